"""The pages say what the code does: generated ones are up to date, and every snippet reads, compiles or parses."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import placements
import pytest
import typer
import yaml
from torch import Tensor
from toys import toy_config, toy_folder, toy_rows

from groupwise.about import ABOUT
from groupwise.cli import app
from groupwise.config import Config
from groupwise.losses import LossInputs
from groupwise.presets import PRESETS
from groupwise.records import Rollout
from groupwise.slots import load_code
from groupwise.train import train
from groupwise.trees import read_yaml

ROOT = Path(__file__).parents[1]
TOOL = str(ROOT / "tools" / "docs.py")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_algorithms.json").read_text())
LEAST: dict[str, Any] = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer"]}


def from_tool(name: str) -> Any:
    """A name of tools/docs.py."""
    return vars(sys.modules[load_code(f"{TOOL}:pages").__module__])[name]


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """(where it stands, code) of each fenced block in this language."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield f"{page.name}:{text[: match.start()].count(chr(10)) + 1}", match[1]


def snippets(language: str) -> list[Any]:
    return [pytest.param(code, id=where) for page in PAGES for where, code in blocks(page, language)]


@pytest.fixture
def with_the_files_that_pages_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python block whose first line is `# name.py` is a file beside the run file."""
    for page in PAGES:
        for _, code in blocks(page, "python"):
            named = re.match(r"# (\w+\.py)\n", code)
            if named:
                (tmp_path / named[1]).write_text(code)
    monkeypatch.chdir(tmp_path)


def test_generated_pages_are_what_make_docs_makes() -> None:
    for path, text in load_code(f"{TOOL}:pages")().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale: run `make docs`"


def test_every_preset_has_an_entry_and_a_place_on_the_page() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert list(ABOUT) == list(PRESETS)
    for name, about in ABOUT.items():
        assert f"\n## {name}\n" in page
        assert about.title and about.idea and about.when  # noqa: PT018
        assert all(re.fullmatch(r"\d{4}\.\d{5}", paper) for paper in about.paper.split())


@pytest.mark.parametrize("name", PRESETS)
def test_the_slots_on_the_page_are_the_preset(name: str) -> None:
    page = ROOT / "docs" / "algorithms.md"
    written = {code.split(",")[0].removeprefix("# algorithm: "): code for _, code in blocks(page, "yaml")}
    assert Config.parse({**LEAST, **yaml.safe_load(written[name])}).algorithm == PRESETS[name]


@pytest.mark.usefixtures("with_the_files_that_pages_name")
@pytest.mark.parametrize("code", snippets("yaml"))
def test_a_run_file_in_the_pages_is_read(code: str) -> None:
    Path("run.yaml").write_text(code)
    Config.parse({**LEAST, **read_yaml(Path("run.yaml"))})


@pytest.mark.parametrize("code", snippets("python"))
def test_python_in_the_pages_compiles_and_what_it_imports_from_groupwise_is_there(code: str) -> None:
    compile(textwrap.dedent(code), "page", "exec")
    import groupwise

    for names in re.findall(r"^from groupwise import (.+)$", code, re.MULTILINE):
        assert set(names.split(", ")) <= set(groupwise.__all__)
    assert set(re.findall(r"\bgw\.(\w+)", code)) <= set(groupwise.__all__)


@pytest.mark.parametrize("code", snippets("bash"))
def test_a_command_in_the_pages_is_one_that_the_command_line_takes(code: str) -> None:
    commands = typer.main.get_command(app)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in code.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert set(words) <= set(targets)
        if program == "groupwise":
            command = commands.commands[words[0]]  # type: ignore[attr-defined]
            command.make_context(words[0], words[1:])  # reads options and arguments, and runs nothing


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_table_of_kl_gradients_has_the_golden_numbers() -> None:
    found, golden = from_tool("kl_gradients")(), GOLDEN["kl_estimators"]["exact_categorical"]
    expected = {**golden["expected_grad_logits"]}
    del expected["abs_in_loss"]  # not offered
    expected |= {"reverse_kl": golden["true_reverse_kl_grad_logits"], "forward_kl": golden["forward_kl_grad_logits"]}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-15), name


def test_what_the_page_says_of_a_kl_gradient_is_true() -> None:
    g = from_tool("kl_gradients")()
    assert g["k1_in_loss"] == pytest.approx([0, 0, 0], abs=1e-15)
    for name in ("k2_in_loss", "k3_in_loss_is_corrected", "k1_in_reward"):
        assert g[name] == pytest.approx(g["reverse_kl"])
    assert g["k3_in_loss"] == pytest.approx(g["forward_kl"])
    for name in ("k2_in_reward", "k3_in_reward"):
        assert all(wrong * right < 0 for wrong, right in zip(g[name], g["reverse_kl"], strict=True))


def nowhere(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A surrogate that no update can follow."""
    return x.logprobs * math.nan, {}


def test_every_metric_of_a_run_is_documented_and_every_documented_metric_is_in_a_run(tmp_path: Path) -> None:
    documented = {name for group in from_tool("METRICS").values() for name in group}
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    calls = itertools.count(1)

    def sometimes(rollout: Rollout) -> float:
        return 1 / (next(calls) % 8)

    found: set[str] = set()
    algorithms = ({"preset": "grpo", "correction": "importance"}, "ppo", {"surrogate": f"{__file__}:nowhere"})
    placed: list[dict[str, Any]] = [{"ahead": 1, "engine": {"placement": f"{placements.__file__}:one"}}, {}, {}]
    for number, (algorithm, placement) in enumerate(zip(algorithms, placed, strict=True)):
        config = toy_config(
            tmp_path,
            algorithm=algorithm,
            **placement,
            rewards=["exact_match", {"use": sometimes, "trial": False}],
            steps=2,
            evaluation={"data": {"path": str(tmp_path / "rows.jsonl"), "limit": 4}, "samples": 2, "temperature": 1.0},
            checkpoint={"every": 1},
            guards={"max_skipped_updates": 2},
            output=str(tmp_path / f"run-{number}"),
        )
        run = train(config)
        for line in (run.folder / "metrics.jsonl").read_text().splitlines():
            found |= set(json.loads(line))
    patterns = {name: re.sub(r"<\w+>", r"\\w+", re.escape(name)) for name in documented}
    undocumented = {name for name in found if not any(re.fullmatch(p, name) for p in patterns.values())}
    assert not undocumented, f"write a sentence on {undocumented} in METRICS of tools/docs.py"
    unseen = {name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, key) for key in found)}
    assert not unseen, f"no run writes {unseen}"
