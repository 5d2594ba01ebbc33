"""`groupwise doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from groupwise.diagnosis import Finding, diagnose, read_run

app = typer.Typer()
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, also of a run that is going on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON array.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Say what is wrong with a run, why, and what to try; the worst first."""
    evidence = read_run(run)
    findings = diagnose(evidence)
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings]))
        return
    console = Console()
    for finding in findings:
        console.print(shown(finding), "")
    if not findings:
        console.print(f"nothing to report after {len(evidence.steps)} steps", highlight=False)


def shown(finding: Finding) -> Text:
    """A finding for the terminal."""
    return Text.assemble(
        (f"{finding.severity}  ", STYLES[finding.severity]),
        (finding.title, "bold"),
        f"\n  {finding.why}\n  ",
        ("try ", "green"),
        f"{finding.advice}\n  ",
        (f"evidence {finding.evidence}", "dim"),
    )
