"""Writes docs/errors.md: what users get wrong and what `groupwise train` says, and the same inputs given to TRL.

No message is written down: each mistake of tests/mistakes.py is made, and what the command says is quoted.
`tests/test_errors.py` fails when the committed page differs from what this makes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import conftest  # noqa: F401 - offline and on one thread, like the tests
from mistakes import GROUPS, MISTAKES
from toys import toy_folder
from trl_rows import ROWS, Row
from workplace import says

PAGE = ROOT / "docs" / "errors.md"
INTRODUCTION = """# Errors

<!-- Made by `make docs` from tests/mistakes.py and tests/trl_rows.py; do not edit. -->

`groupwise train` looks at everything that can be known before the first token is sampled, most of it before the
weights are read: settings, prompts, rewards, the model's files, the run folder, memory and disk. Checks that do not
depend on each other all run, and one report numbers what they found. Each problem names the place, the value that
stands there, what is accepted, and the way out; the command exits with 2 (1 where
a process of the run was lost). `--traceback` shows where it was raised.

What runs, but is rarely meant, is a warning at the start of the run: prompts that occur more than once, settings
without effect, a micro-batch that may not fit into memory.

Every message on this page is what the command said when the page was made.
"""
COMPARISON = """
## The same inputs in TRL 1.16.0

What `GRPOTrainer` of TRL 1.16.0 does was measured on a CPU with a tiny model.
"""


def page(said: Mapping[str, str]) -> str:
    """The page, from what is said about each mistake by its name."""
    lines = [INTRODUCTION]
    for group, mistakes in GROUPS.items():
        lines += [f"## {group}\n", _row("what was done", "what is said"), "| --- | --- |"]
        lines += [_row(did, _quoted(said[f"{group}: {did}"])) for did in mistakes]
        lines.append("")
    lines += [COMPARISON.lstrip("\n"), _row("input", "TRL 1.16.0", "here"), "| --- | --- | --- |"]
    lines += [_row(row.given, row.trl, _here(row, said)) for row in ROWS]
    return "\n".join([*lines, ""])


def _here(row: Row, said: Mapping[str, str]) -> str:
    return "<br>".join([*(_quoted(said[name]) for name in row.ours), *filter(None, [row.text])])


def _quoted(message: str) -> str:
    return "<br>".join(f"`` {line} ``" for line in message.splitlines())


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model, said = toy_folder(Path(folder) / "model"), dict[str, str]()
        for number, (name, mistake) in enumerate(MISTAKES.items()):
            (Path(folder) / str(number)).mkdir()
            said[name] = says(mistake, Path(folder) / str(number), model)
        PAGE.write_text(page(said), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
