"""`groupwise import roll FILE.yaml` and `groupwise import trl FILE.yaml|key=value...`: a run file of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from groupwise.errors import ConfigError
from groupwise.foreign import Imported
from groupwise.foreign.roll import import_roll
from groupwise.foreign.trl import import_trl

app = typer.Typer(
    no_args_is_help=True,
    help="Turn the run file of another trainer into ours: the run file on standard output, a note on each of its keys "
    "on standard error.",
)
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the run file here; it must not exist.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]


@app.command()
def roll(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A ROLL RLVR config.")],
    output: Output = None,
    traceback: Traceback = False,
) -> None:
    """From a ROLL RLVR config."""
    _write(import_roll(file), output)


@app.command()
def trl(
    settings: Annotated[
        list[str], typer.Argument(metavar="[FILE.yaml] [key=value]...", help="GRPOConfig fields: a file, settings.")
    ],
    output: Output = None,
    traceback: Traceback = False,
) -> None:
    """From the GRPOConfig of TRL: a YAML or JSON file, or settings such as loss_type=grpo beta=0.04."""
    _write(import_trl(settings), output)


def _write(imported: Imported, output: Path | None) -> None:
    """Print the notes and the run file, or write the latter.

    Raises:
        ConfigError: there is such a file already, or no folder for it.
    """
    for note in imported.notes:
        print(note, file=sys.stderr)
    if output is None:
        print(imported.to_yaml(), end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(imported.to_yaml())
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; name another file with -o") from None
