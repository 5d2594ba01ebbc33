"""`python -m groupwise` is the `groupwise` command."""

from groupwise.cli import main

main()
