"""A file imports only from lower floors, so the mathematics runs without a model and the loop without a GPU.

The tables are the architecture: a new module, a new library or an import between neighbours is a decision, taken here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "groupwise"

PLAN = ("kernels", "rehearsal", "machine", "calibrate", "sampling", "local", "outlook", "cluster", "simulate", "report")
"""Each may import those before it."""
DIAGNOSIS_RULES = ("of_rewards", "of_completions", "of_updates")
FLOORS = (
    {"errors", "records", "seeding", "slots", "devices", "hub", "environment", "files", "interrupt", "launch", "ahead"}
    | {"busy", "demands", "meeting", "schema", "trees"},
    {"advantages", "shaping", "weights", "losses", "penalties", "model", "model_files", "resources", "head"}
    | {"adapters", "folding", "lean", "decoding", "drawing", "attention", "packing", "guards", "pending"}
    | {"statistics", "groups", "rows"},
    {"formula", "crediting", "batching", "objective", "combinations", "algorithms", "presets", "chat", "engines"}
    | {"about", "metrics"}
    | {"trackers", "trackers.tensorboard", "trackers.wandb", "trackers.trackio"},
    {"rollout", "tasks", "columns", "data", "rewards", "checkpoint", "surplus", "completions", "journal"}
    | {f"engines.{name}" for name in ("local", "local_sampler", "local_learner", "critic", "steps", "fake")}
    | {f"engines.{name}" for name in ("fsdp", "fsdp_critic", "ranks", "reference", "shards", "shard_files")}
    | {f"engines.{name}" for name in ("ray", "cluster", "pool", "actors")}
    | {f"engines.{name}" for name in ("vllm", "vllm_sampler", "vllm_server", "vllm_weights")}
    | {f"engines.vllm_side.{name}" for name in ("groupwise_worker", "groupwise_watch")},
    {"train", "experience", "build", "checks", "cautions", "settling", "evaluate", "log", "terminal", "config"}
    | {"curriculum", "explain", "footprint", "probes"}
    | {"report", "report.completions", "report.data", "report.watch"}
    | {"compare", *(f"compare.{name}" for name in ("stored", "opinions", "policy", "tables"))}
    | {"diagnosis", *(f"diagnosis.{name}" for name in ("evidence", "findings", *DIAGNOSIS_RULES))},
    {"cli", "eval_cli", "quickstart", "arithmetic", "check_reward", "diff"}
    | {"report.cli", "diagnosis.cli", "compare.cli"}
    | {"plan", *(f"plan.{name}" for name in PLAN)}
    | {"foreign", "foreign.roll", "foreign.roll_algorithm", "foreign.trl", "foreign.trl_algorithm", "foreign.cli"},
)
SURFACE = {"", "__main__"}  # groupwise/__init__.py gathers the public names; nothing of ours imports it

NEIGHBOURS = {  # who may import whom on the same floor; never in a circle
    "slots": {"errors"},
    "schema": {"errors", "slots"},
    "trees": {"errors"},
    "devices": {"errors"},
    "files": {"errors"},
    "interrupt": {"errors"},
    "launch": {"interrupt", "meeting"},
    "meeting": {"errors"},
    "shaping": {"advantages"},
    "groups": {"advantages"},
    "penalties": {"losses"},
    "weights": {"losses"},
    "head": {"model"},
    "folding": {"adapters"},
    "decoding": {"model"},
    "drawing": {"head"},
    "lean": {"decoding", "folding"},
    "engines.critic": {"engines.steps"},
    "engines.local_learner": {"engines.reference", "engines.steps"},
    "engines.local": {"engines.local_sampler", "engines.local_learner", "engines.critic", "engines.ranks"},
    "engines.shards": {"engines.ranks"},
    "engines.shard_files": {"engines.ranks", "engines.shards", "engines.steps"},
    "engines.fsdp_critic": {f"engines.{name}" for name in ("critic", "ranks", "shards", "shard_files", "steps")},
    "engines.fsdp": {"engines.fsdp_critic", "engines.local", "engines.ranks", "engines.reference"}
    | {"engines.shards", "engines.shard_files", "engines.steps"},
    "engines.vllm_sampler": {"engines.vllm_server", "engines.vllm_weights"},
    "engines.vllm": {"engines.vllm_sampler", "engines.vllm_server"},
    "engines.actors": {"engines.local"},
    "engines.ray": {"engines.actors", "engines.cluster", "engines.local", "engines.pool"},
    "packing": {"attention", "model"},
    "model": {"model_files"},
    **{stage: {"formula"} for stage in ("crediting", "batching", "objective", "combinations")},
    "algorithms": {"formula", "crediting", "batching", "objective", "combinations"},
    "presets": {"algorithms"},
    "tasks": {"rewards"},
    "data": {"columns", "rewards", "tasks"},
    "rollout": {"tasks", "rewards"},
    "terminal": {"evaluate", "diagnosis"},
    "log": {"evaluate", "diagnosis", "terminal"},
    "config": {"curriculum"},
    "diagnosis.evidence": {"config"},
    "diagnosis.findings": {"diagnosis.evidence"},
    **{f"diagnosis.{name}": {"diagnosis.evidence", "diagnosis.findings"} for name in DIAGNOSIS_RULES},
    "diagnosis": {"diagnosis.evidence", "diagnosis.findings", *(f"diagnosis.{name}" for name in DIAGNOSIS_RULES)},
    "cautions": {"config"},
    "footprint": {"config"},
    "checks": {"config", "footprint"},
    "settling": {"config", "checks", "footprint"},
    "build": {"config", "checks", "settling", "curriculum", "evaluate", "log"},
    "experience": {"config", "build"},
    "train": {"config", "build", "cautions", "evaluate", "experience", "log"},
    "compare.stored": {"config"},
    "compare.policy": {"config", "settling", "compare.stored"},
    "compare": {"config", *(f"compare.{name}" for name in ("stored", "opinions", "policy", "tables"))},
    "report.data": {"compare.tables", "config", "diagnosis", "explain", "report.completions"},
    "report": {"report.completions", "report.data"},
    "report.watch": {"report", "report.completions", "report.data"},
    **{f"plan.{name}": {f"plan.{below}" for below in PLAN[:place]} for place, name in enumerate(PLAN) if place},
    "quickstart": {"arithmetic"},
    "foreign.roll_algorithm": {"foreign"},
    "foreign.roll": {"foreign", "foreign.roll_algorithm"},
    "foreign.trl_algorithm": {"foreign"},
    "foreign.trl": {"foreign", "foreign.trl_algorithm"},
    "foreign.cli": {"foreign", "foreign.roll", "foreign.trl"},
    "cli": {"check_reward", "quickstart", "diff", "eval_cli", "plan.machine", "plan.outlook", "plan.report"}
    | {f"{name}.cli" for name in ("foreign", "report", "diagnosis", "compare")},
}
# An engine knows tensors and requests, never an algorithm, a task or the loop.
ENGINES_MAY_IMPORT = {
    "adapters",
    "busy",
    "demands",
    "devices",
    "folding",
    "drawing",
    "engines",
    "model",
    "head",
    "model_files",
    "lean",
    "decoding",
    "packing",
    "records",
    "slots",
    "seeding",
    "errors",
    "interrupt",
    "meeting",
}

# What `pip install groupwise` brings. pydantic_core, huggingface_hub, pyarrow and markupsafe come with pydantic,
# transformers, datasets and jinja2 and are part of their interface, as latex2sympy2_extended and sympy are of
# math-verify's.
CORE = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "pydantic", "yaml", "typer", "rich"}
CORE |= {"jinja2", "markupsafe", "math_verify", "latex2sympy2_extended", "sympy", "pydantic_core", "huggingface_hub"}
CORE |= {"pyarrow"}
# An extra is imported in one file only, and httpx2, which is in the core for servers, in two: judges, and vLLM, which
# itself is never imported: it has an environment of its own. Whoever first uses one without a file names its file here.
EXTRAS = {"ray": "engines.cluster", "reasoning_gym": "rewards.gym"}
TALKS_TO_SERVERS = {"rewards.endpoint", "engines.vllm_server"}
EXTRAS |= dict.fromkeys(["jsonschema", "referencing"], "rewards.json_schema")
EXTRAS |= {
    "peft": "adapters",
    "tensorboard": "trackers.tensorboard",
    "wandb": "trackers.wandb",
    "trackio": "trackers.trackio",
}
# The mathematics can be read and tested with one array library.
ONLY = {
    "statistics": {"numpy"},
    "advantages": {"numpy", "pydantic"},
    "shaping": {"numpy", "pydantic"},
    "penalties": {"torch", "pydantic"},
    "losses": {"torch", "pydantic"},
    "weights": {"torch", "pydantic"},
}


def module_name(file: Path) -> str:
    """`engines.local` for src/groupwise/engines/local.py, `engines` for its __init__.py."""
    return ".".join(part for part in file.relative_to(SRC).with_suffix("").parts if part != "__init__")


FILES = {module_name(file): file for file in sorted(SRC.rglob("*.py"))}


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Every module that the source imports, anywhere in it; `package` is where it stands, for relative imports.

    Raises:
        SyntaxError: the source is not Python.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            where = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:  # `from groupwise import losses` imports a module, not a name
                inner = f"{where}.{alias.name}"
                yield inner if inner.removeprefix("groupwise.") in FILES else where


def imported(module: str) -> tuple[set[str], set[str]]:
    """(modules of ours, libraries) that the module imports."""
    file = FILES[module]
    names = set(imports(file.read_text(encoding="utf-8"), ("groupwise", *file.relative_to(SRC).parts[:-1])))
    ours = {name for name in names if name.split(".")[0] == "groupwise"}
    libraries = {name.split(".")[0] for name in names - ours} - sys.stdlib_module_names
    return {name.removeprefix("groupwise").removeprefix(".") for name in ours}, libraries


def place(module: str) -> str:
    """The entry of the tables that speaks for the module: rewards/ is one, each engine is its own."""
    return "rewards" if module.startswith("rewards.") else module


def floor(module: str) -> int:
    """Its height; above everything when it has none yet."""
    return next((height for height, modules in enumerate(FLOORS) if place(module) in modules), len(FLOORS))


def allowed(module: str, other: str) -> bool:
    """Whether `module` may import `other`."""
    if module in SURFACE:
        return True
    if other in SURFACE:
        return False
    if module.startswith("engines."):
        return other in ENGINES_MAY_IMPORT or other in NEIGHBOURS.get(module, ())
    here, there = place(module), place(other)
    return floor(there) < floor(here) or here == there == "rewards" or there in NEIGHBOURS.get(here, ())


def test_every_module_has_a_floor() -> None:
    known = set().union(*FLOORS) | SURFACE
    homeless = sorted(module for module in FILES if place(module) not in known)
    assert not homeless, f"add {homeless} to FLOORS: the lowest floor above everything that it imports"


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_from_lower_floors(module: str) -> None:
    ours, _ = imported(module)
    wrong = sorted(other for other in ours if not allowed(module, other))
    assert not wrong, f"groupwise.{module} may not import {wrong}"


@pytest.mark.parametrize("module", FILES)
def test_a_library_is_in_the_core_or_an_extra_in_its_own_file(module: str) -> None:
    _, libraries = imported(module)
    known = CORE | ({"httpx2"} if module in TALKS_TO_SERVERS else set())
    wrong = sorted(name for name in libraries - known if EXTRAS.get(name) != module)
    assert not wrong, f"groupwise.{module} may not import {wrong}"
    assert libraries <= ONLY.get(module, libraries), f"groupwise.{module} needs nothing but {ONLY[module]}"


def test_neighbours_never_import_in_a_circle() -> None:
    def reachable(module: str) -> set[str]:
        near = NEIGHBOURS.get(module, set())
        return near.union(*map(reachable, near))  # recursion without end is the circle

    for module in NEIGHBOURS:
        assert module not in reachable(module)
        assert {floor(other) for other in NEIGHBOURS[module]} == {floor(module)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import groupwise.losses as L", {"groupwise.losses"}),
        ("from groupwise import records, Rollout", {"groupwise.records", "groupwise"}),
        ("from groupwise.engines import Sampler", {"groupwise.engines"}),
        ("from . import Sampler", {"groupwise.engines"}),
        ("from ..records import Batch", {"groupwise.records"}),
        ("def late():\n    import ray.util", {"ray.util"}),
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str, found: set[str]) -> None:
    assert set(imports(source, ("groupwise", "engines"))) == found


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("losses", "advantages"),
        ("records", "algorithms"),
        ("engines.local", "algorithms"),
        ("engines.ray", "engines.vllm"),
        ("engines", "engines.local"),
        ("rewards.math", "tasks"),
        ("evaluate", "train"),
        ("train", ""),
    ],
)
def test_an_import_from_the_same_or_a_higher_floor_is_refused(module: str, other: str) -> None:
    assert not allowed(module, other)
