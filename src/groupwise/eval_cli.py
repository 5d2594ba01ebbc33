"""`groupwise eval`: how good a model is on a dataset, by category, and against another model on the same prompts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from groupwise.checkpoint import model_of
from groupwise.config import Config
from groupwise.errors import ConfigError, DataError, did_you_mean
from groupwise.evaluate import Scores, evaluate
from groupwise.slots import replace
from groupwise.statistics import MOST_SAMPLES, Difference, Estimate, Floats, differences, estimate
from groupwise.tasks import Row, Task
from groupwise.trees import Tree, apply

app = typer.Typer()
ENGINE = tuple(f"engine.{name}" for name in ("device", "dtype", "threads", "sample_tokens"))
ACCEPTED = ("data", "rewards", "seed", *ENGINE, "sampling.max_tokens", "evaluation.max_tokens")
DRAWN = ("evaluation.temperature", "evaluation.top_p", "evaluation.top_k")
"""Settings of the samples; the greedy answer has none."""


@dataclass(frozen=True)
class Examined:
    """What one model did: its greedy answers, and its samples where there are some."""

    model: str
    draws: Mapping[str, Scores]
    """By name: `greedy`, `samples`."""

    @property
    def per_prompt(self) -> dict[str, Floats]:
        """float[prompts] by the name of a figure."""
        return {name: values for scores in self.draws.values() for name, values in scores.per_prompt.items()}


@app.command("eval")
def evaluate_model(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="Model folder, hub id, or a run folder.")],
    data: Annotated[str, typer.Option("--data", help="Dataset: .jsonl, .json, .csv, .parquet or a hub id.")],
    reward: Annotated[list[str], typer.Option("--reward", help="A reward; the first is the one that counts.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings such as sampling.max_tokens=512.")
    ] = None,
    k: Annotated[
        str, typer.Option("--k", "-k", metavar="1,4,16", help="Also sample as often as the largest: pass@k, maj@k.")
    ] = "",
    by: Annotated[
        str | None, typer.Option("--by", metavar="COLUMN", help="Also a table by this column of the data.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL|RUN", help="Compare with it on the same prompts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Score a model on a dataset: greedy accuracy, and of samples mean, pass@k and maj@k, with 95% intervals."""
    ks, say = counts(k), Console(stderr=True, quiet=quiet)
    configs = [configure(name, data, reward, settings or [], ks) for name in (model, against) if name is not None]
    task = shared_task(configs)
    labels = None if by is None else categories(task, by)
    examined = [examine(config, task, ks) for config in configs]
    first = task.rewards[0].title
    for text in cautions(examined, first):
        say.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    result = report(examined, labels, configs[0].seed)
    if as_json:
        print(json.dumps(_finite({"reward": first, **result, **({} if by is None else {"by": by})})))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for table in tables(result, first, by):
        console.print(table)
    for one in examined:
        for name, scores in one.draws.items():
            console.print(_other_numbers(f"{one.model}, {name}", scores, first), highlight=False, markup=False)


# What is asked -------------------------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """`1,4,16` as numbers, each once and in order.

    Raises:
        ConfigError: they are no numbers of samples.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    wrong = [part for part in parts if not part.isdecimal() or not 1 <= int(part) <= MOST_SAMPLES]
    if wrong:
        raise ConfigError(f"--k: {wrong[0]!r}; accepted: numbers from 1 to {MOST_SAMPLES}, as in --k 1,4,16")
    return sorted({int(part) for part in parts})


def configure(model: str, data: str, rewards: Sequence[str], settings: Sequence[str], ks: Sequence[int]) -> Config:
    """The settings of an evaluation; `evaluation` says how samples are drawn, by default at temperature 1.

    Raises:
        ConfigError: a setting is wrong, or has no effect on this evaluation.
        CheckpointError: a run has no model yet.
    """
    tree: Tree = {"model": model_of(model), "data": {"path": data}, "rewards": list(rewards)}
    tree["evaluation"] = {"temperature": 1.0}
    for text in settings:
        apply(tree, text)
    accepted = ACCEPTED + (DRAWN if ks else ())
    for key in (text.partition("=")[0] for text in settings):
        if not any(key == name or key.startswith(f"{name}.") for name in accepted):
            raise ConfigError(f"{key}: {_without_effect(key)}; accepted: {', '.join(accepted)}")
    config = Config.parse(tree)
    if config.evaluation.temperature == 0:
        raise ConfigError(
            "evaluation.temperature: 0; all samples of a prompt would be the same: use a value above 0, or leave --k "
            "away for the greedy answer alone"
        )
    longest = config.evaluation.sampling(config.sampling).max_tokens
    return replace(config, sampling=replace(config.sampling, max_tokens=longest))


def _without_effect(key: str) -> str:
    if key in DRAWN:
        return "has no effect without --k, for the one answer is greedy; add --k 1"
    if key == "evaluation.samples":
        return "use --k: as many samples are drawn as its largest number"
    if key.startswith("sampling."):
        return f"is that of training; use {key.replace('sampling', 'evaluation')}"
    return "has no effect on an evaluation"


def shared_task(configs: Sequence[Config]) -> Task:
    """The prompts that all models are asked: those that fit the context of each.

    Raises:
        GroupwiseError: see `prepare`.
    """
    from groupwise.build import prepare

    found: list[Task] = []
    for config in configs:
        found.append(prepare(config, found[-1] if found else None, training=False).task)
    longest = [task.longest_prompt for task in found if task.longest_prompt is not None]
    return dataclasses.replace(found[-1], longest_prompt=min(longest, default=None))


def categories(task: Task, column: str) -> list[str]:
    """What each row has in a column.

    Raises:
        DataError: a row has no such column.
    """
    for place, row in enumerate(task.rows):
        if column not in row:
            hint = did_you_mean(column, row)
            raise DataError(f"--by: {column}: rows[{place}] has no such column{hint}; accepted: {', '.join(row)}")
    return [_label(row, column) for row in task.rows]


def _label(row: Row, column: str) -> str:
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def examine(config: Config, task: Task, ks: Sequence[int]) -> Examined:
    """Ask a model every prompt greedily, and as often as the largest k says; its memory is free again afterwards."""
    from groupwise.build import load_sampler

    sampler, chat = load_sampler(config.model, config.engine)
    sampling = config.evaluation.sampling(config.sampling)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    draws = {"greedy": evaluate(task, sampler, chat, sampling=greedy, seed=config.seed)}
    if ks:
        draws["samples"] = evaluate(task, sampler, chat, sampling=sampling, samples=ks[-1], ks=ks, seed=config.seed)
    return Examined(config.model, draws)


# What is said --------------------------------------------------------------------------------------------------------


def cautions(examined: Sequence[Examined], reward: str) -> Iterator[str]:
    """What the figures leave out."""
    for one in examined:
        rollouts = [rollout for scores in one.draws.values() for rollout in scores.rollouts]
        problems = [rollout.problem for rollout in rollouts if not rollout.valid]
        if problems:
            text = f"{len(problems)} of {len(rollouts)} completions have no reward and count as 0: {problems[0]}"
            yield f"{one.model}: {text}"
    if "samples" in examined[0].draws and not any(name.startswith("maj@") for name in examined[0].per_prompt):
        yield f"maj@k is left out: {reward} judges completions and has no method `answer` that says what to vote on"


def report(examined: Sequence[Examined], labels: Sequence[str] | None, seed: int) -> dict[str, Any]:
    """The figures of the first model, and its differences from the second where there is one, as `--json` prints them:
    of all prompts, and of each category where there are labels of the rows."""
    rows = examined[0].draws["greedy"].rows
    whole = _part(examined, np.arange(len(rows)), seed)
    result: dict[str, Any] = {"models": [_about(one) for one in examined], **whole}
    if labels is not None:
        own = np.array([labels[row] for row in rows])
        result["categories"] = {label: _part(examined, np.flatnonzero(own == label), seed) for label in _sorted(own)}
    return result


def _part(examined: Sequence[Examined], places: NDArray[np.intp], seed: int) -> dict[str, Any]:
    chosen = [{name: values[places] for name, values in one.per_prompt.items()} for one in examined]
    figures = [{name: estimate(values, seed) for name, values in one.items()} for one in chosen]
    part: dict[str, Any] = {"prompts": len(places), "figures": figures[0]}
    if len(chosen) > 1:
        part |= {"against": figures[1], "differences": differences(chosen[0], chosen[1], seed)}
    return part


def _about(one: Examined) -> dict[str, Any]:
    shared = ("means", "completion_length", "truncated")
    draws = {name: {field: getattr(scores, field) for field in shared} for name, scores in one.draws.items()}
    return {"model": one.model, **draws}


def _sorted(labels: NDArray[np.str_]) -> list[str]:
    """By value where all are numbers, else as text."""
    found = sorted(set(labels.tolist()))
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def tables(result: Mapping[str, Any], reward: str, by: str | None) -> Iterator[Table]:
    """The figures of all prompts, the differences between two models, and by category the figures of the largest k."""
    names = [one["model"] for one in result["models"]]
    title = f"{reward} on {result['prompts']} prompts"
    table = Table("", *names, title=title)
    for name in result["figures"]:
        table.add_row(name, *(_in_words(result[whose][name]) for whose in ("figures", "against") if whose in result))
    yield table
    if "differences" in result:
        table = Table("", "difference", "p", "test", title=f"{names[0]} minus {names[1]}")
        for name, found in result["differences"].items():
            table.add_row(name, _in_words(found, "+"), _p(found.p), found.test)
        yield table
    if by is not None:
        largest = {name.partition("@")[0]: name for name in result["figures"]}.values()
        table = Table(by, "prompts", *largest, show_lines=True)
        for label, part in result["categories"].items():
            table.add_row(label, str(part["prompts"]), *(_cell(part, name) for name in largest))
        yield table


def _cell(part: Mapping[str, Any], name: str) -> str:
    change = part["differences"][name] if "differences" in part else None
    interval = _in_words(part["figures"][name]).replace("  ", "\n")
    return interval + (f"\n{change.mean:+.3f}, p {_p(change.p)}" if change else "")


def _in_words(found: Estimate | Difference, sign: str = "") -> str:
    return f"{found.mean:{sign}.3f}  ({found.low:{sign}.3f} to {found.high:{sign}.3f})"


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _other_numbers(name: str, scores: Scores, first: str) -> str:
    others = "".join(f"  {title} {mean:.3f}" for title, mean in scores.means.items() if title != first)
    return f"{name}: {scores.completion_length:.1f} tokens, {scores.truncated:.1%} truncated{others}"


def _finite(value: Any) -> Any:
    """The same with None for what JSON cannot spell, and mappings for named tuples."""
    match value:
        case Estimate() | Difference():
            return _finite(value._asdict())
        case Mapping():
            return {name: _finite(inner) for name, inner in value.items()}
        case list():
            return [_finite(inner) for inner in value]
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value
