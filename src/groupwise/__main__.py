"""`python -m groupwise` is the `groupwise` command."""

import os
import sys

from groupwise.cli import main

try:
    main()
except SystemExit as end:
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise
    # One of several: threads of the process group may outlive the interpreter, and a process that is done would abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else end.code is not None)
