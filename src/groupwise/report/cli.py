"""`groupwise report` and `groupwise watch`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run folder; several are laid over each other.")]


@app.command()
def report(
    runs: Runs,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; by default report.html in the first run.")
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Write what runs did as one HTML page: curves, completions token by token, prompts. It works offline."""
    from groupwise.report import write_report

    print(write_report(runs, output or runs[0] / "report.html"))


@app.command()
def watch(
    runs: Runs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8765,
    host: Annotated[str, typer.Option(help="Other than loopback, the address gets a secret token.")] = "127.0.0.1",
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Serve the same page live while a run goes on; Ctrl-C ends it."""
    from groupwise.report.watch import Server

    with Server(runs, host=host, port=port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.address}  (Ctrl-C ends)", flush=True)
        server.serve_forever()
