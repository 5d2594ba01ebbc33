"""The tests of a dataset row, read: cases of input and output, or a suite of code that a judge can run.

[{"input": "1 2", "output": "3"}, ...]       or {"inputs": [...], "outputs": [...]}, or either as JSON text
"assert add(1, 2) == 3\\nassert add(0, 0) == 0"    or a list of such texts
"def check(candidate): assert candidate(1, 2) == 3"    with the name of the function in another column
"class TestAdd(unittest.TestCase): ..."      or functions test_...
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Case:
    """What a program is given to read and what it should print."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Suite:
    """Code that tests the functions of a program."""

    steps: tuple[tuple[bool, CodeType], ...]
    """(whether it is a test, its code), in order; functions and classes that hold tests are looked for at the end."""
    names: tuple[str, ...]
    """What it uses and does not define: the program has to."""


def read_tests(value: Any, entry_point: str = "") -> tuple[Case, ...] | Suite:
    """The tests in a column of a dataset; `entry_point` is the function that the tests' `check` is called with.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    known = _from_json(value)
    if isinstance(known, Mapping):
        known = _transposed(cast("Mapping[str, Any]", known))
    if isinstance(known, str):
        return _suite((known,), one_each=False, entry_point=entry_point)
    if isinstance(known, Sequence) and known:
        items = list(cast("Sequence[Any]", known))
        if all(isinstance(item, str) for item in items):
            return _suite(tuple(items), one_each=True, entry_point=entry_point)
        if all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in items):
            return tuple(Case(_text(item["input"]), _text(item["output"])) for item in items)
    raise ValueError(
        f"tests that are neither code nor cases: {str(value)[:80]!r}; accepted: Python code, a list of it, a list of "
        "{input, output}, or {inputs, outputs}"
    )


def _from_json(value: Any) -> Any:
    """Datasets hold cases as JSON text, too."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _transposed(columns: Mapping[str, Any]) -> Any:
    inputs, outputs = columns.get("inputs"), columns.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        return columns
    pairs = zip(cast("Sequence[Any]", inputs), cast("Sequence[Any]", outputs), strict=True)
    return [{"input": given, "output": expected} for given, expected in pairs]


def _text(value: Any) -> str:
    return "\n".join(map(str, cast("Sequence[Any]", value))) if isinstance(value, list | tuple) else str(value)


@lru_cache(maxsize=256)  # every completion of a group is tested alike
def _suite(sources: tuple[str, ...], *, one_each: bool, entry_point: str) -> Suite:
    steps: list[tuple[bool, CodeType]] = []
    used: set[str] = set()
    defined: set[str] = set()
    call = (f"check({entry_point})",) if entry_point else ()
    for source in (*sources, *call):
        try:
            tree = ast.parse(source)
            table = symtable.symtable(source, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"tests that are not Python: {error}") from error
        defined |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        used |= set(_globals_used(table))
        if (one_each or source in call) and tree.body:
            steps.append((True, _compiled(tree.body)))
        else:
            steps += [(_asserts(statement), _compiled([statement])) for statement in tree.body]
    names = used - defined - set(vars(builtins)) - {"__name__", "__file__"}
    # A module of the standard library is never the program's: it could be a class of the program called math.
    modules = sorted(names & sys.stdlib_module_names)
    names -= set(modules)
    if not names and not any(map(_imports_solution, sources)):
        raise ValueError("tests that use nothing of the program; a `check(candidate)` needs `entry_point`")
    if entry_point and names != {entry_point}:
        others = ", ".join(sorted(names - {entry_point}))
        raise ValueError(f"tests that use {others} and do not define it; only {entry_point} is the program's")
    imports = [(False, compile("import " + ", ".join(modules), "tests", "exec"))] if modules else []
    return Suite((*imports, *steps), tuple(sorted(names)))


def _imports_solution(source: str) -> bool:
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return "solution" in imported | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def _compiled(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.Module(statements, []), "tests", "exec", dont_inherit=True)


def _asserts(statement: ast.stmt) -> bool:
    """Whether it checks something when it runs, rather than defining what does."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _globals_used(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
    for child in table.get_children():
        yield from _globals_used(child)
