"""`groupwise compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from groupwise.config import algorithm_of

app = typer.Typer()
NARROWEST = 120
"""Columns; the tables are not legible in fewer."""
GRADIENTS = "Load the model, for gradients of the weights and clip fractions; by default where that is possible."


@app.command("compare")
def compare_algorithms(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, also of a run that is going on.")],
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help="Presets or run files, separated by commas.")
    ] = "grpo,dr_grpo,dapo,gspo",
    step: Annotated[int | None, typer.Option("--step", help="Whose rollouts; by default the last step's.")] = None,
    gradients: Annotated[bool | None, typer.Option("--gradients/--no-gradients", help=GRADIENTS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Show what other algorithms would do with a step's rollouts: advantages, gradients, whom they favour, clipping."""
    from groupwise.compare import compare, save
    from groupwise.compare.tables import tables

    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    chosen = {name: algorithm_of(name) for name in names}
    with Console(stderr=True, quiet=as_json).status("comparing"):
        result = compare(run, chosen, step, gradients=gradients)
    if as_json:
        print(json.dumps(result, allow_nan=False))
        save(run, result)
        return
    console = Console()
    if console.width < NARROWEST or not console.is_terminal:
        console = Console(width=NARROWEST)
    for part in _shown(tables(result)):
        console.print(part)
    print(f"kept for `groupwise report`: {save(run, result)}")


def _shown(found: list[dict[str, Any]]) -> Iterator[RenderableType]:
    for one in found:
        table = Table(box=None, title=one["title"], title_justify="left", title_style="bold", header_style="bold")
        for place, name in enumerate(one["columns"]):
            table.add_column(name, justify="right" if place and one["numbers"] else "left")
        for row in one["rows"]:
            table.add_row(*map(Text, row))
        yield table
        yield Text(f"{one['note']}\n", style="dim")
