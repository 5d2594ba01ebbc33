"""Where a size budget of the design is passed. A passed budget asks for the missing idea; it fails nothing."""

from __future__ import annotations

import ast
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

SRC = Path(__file__).parents[1] / "src" / "groupwise"
# Engines, rewards, reading of other projects' files, the demonstration and what only explains.
NOT_CORE = ("engines", "rewards", "foreign", "arithmetic.py", "quickstart.py", "explain.py", "report")
CORE_LINES, MODULE_LINES, FUNCTION_LINES, SETTINGS = 3_000, 350, 60, 70


def count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def function_lengths(file: Path) -> list[tuple[str, int, int]]:
    """(name, line, length) of each function, from `def` to its last line; nested ones on their own, too."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]


def count_settings(model: Any) -> int:
    """Leaf fields of a pydantic model. A field that chooses among several models is one setting: the choice."""
    from pydantic import BaseModel

    count = 0
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if get_origin(annotation) in (Union, types.UnionType):  # X | None is X
            annotation, *more = [part for part in get_args(annotation) if part is not type(None)]
            annotation = None if more else annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            count += count_settings(annotation)
        elif name != "type":  # the tag of a choice, not a setting
            count += 1
    return count


def report() -> list[str]:
    files = sorted(SRC.rglob("*.py"))
    core = sum(count_lines(file) for file in files if file.relative_to(SRC).parts[0] not in NOT_CORE)
    totals = [("core", core, CORE_LINES, "lines")]
    try:
        from groupwise.config import Config
    except ImportError:
        print("budgets: groupwise.config cannot be imported, so settings are not counted")
    else:
        totals.append(("settings", count_settings(Config), SETTINGS, "settings"))
    print("budgets: " + ", ".join(f"{name} {size:,} of {budget:,} {unit}" for name, size, budget, unit in totals))

    passed = [f"{name}: {size:,} {unit}, budget {budget:,}" for name, size, budget, unit in totals if size > budget]
    for file in files:
        where = file.relative_to(SRC.parents[1])
        if count_lines(file) > MODULE_LINES:
            passed.append(f"{where}: {count_lines(file)} lines, budget {MODULE_LINES}")
        for name, line, length in function_lengths(file):
            if length > FUNCTION_LINES:
                passed.append(f"{where}:{line} {name}: {length} lines, budget {FUNCTION_LINES}")
    return passed


if __name__ == "__main__":
    for line in report():
        print(f"  over: {line}")
