"""What runs inside the sandbox, on the standard library alone: confine the process, then play one of three parts.

    script   runs a program as `python program.py` does
    serve    loads a program and does what a judge at the other end of a socket asks of it
    judge    runs the tests of a dataset row, which know the program only as `Remote` objects

The trainer imports none of them for what they do: `sandbox.py` compiles the files and sends them in.  The tests, and so
the values they expect, are in the judge's process only; the program is in another sandbox and sees the arguments of
calls.  What it answers arrives in the judge as data of built-in types, or as a `Remote`, which equals nothing but
itself.  So there is no harness that the program could patch, and no `__eq__` of its own that would ever be asked.
"""
