"""A run folder as plain data: what the page shows, and nothing of how.

Everything here is JSON-able; a number that does not exist is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from groupwise.algorithms import Algorithm
from groupwise.compare.tables import stored_tables
from groupwise.config import Config
from groupwise.diagnosis import diagnose, read_run
from groupwise.errors import CheckpointError
from groupwise.explain import LEGEND, differences, equations
from groupwise.files import whole_lines
from groupwise.presets import PRESETS
from groupwise.report.completions import Digest, Floats, Json, choose, digest, question, rewards_of, step_of
from groupwise.rewards import PASSED
from groupwise.statistics import estimate

MOST_POINTS = 1000
"""A curve of a longer run shows means of neighbouring steps."""
COLUMNS, BINS = 80, 24
"""Of the pictures of distributions: steps across, values up."""
MOST_PROMPTS = 60
"""A list of prompts shows no more."""


class RunFolder:
    """A run on disk, finished or still growing; what was read of a step is kept, so that looking again is cheap."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: the folder is no run.
            ConfigError: its config.yaml cannot be read.
        """
        if not (folder / "config.yaml").is_file():
            raise CheckpointError(
                f"{folder}: not a run folder (it has no config.yaml); pass the folder that a run printed"
            )
        self.folder = folder
        self.config = Config.load(folder / "config.yaml").resolve()
        self._digests: dict[Path, tuple[int, Digest]] = {}

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.resolve().name

    def files(self, where: str = "rollouts") -> dict[int, Path]:
        """The files of completions by step, in order; `where` is rollouts or evaluations."""
        return {step_of(file): file for file in sorted(self.folder.glob(f"{where}/step-*.parquet"), key=step_of)}

    def state(self) -> str:
        """Another text whenever the run has written something."""
        path = self.folder / "metrics.jsonl"
        written = path.stat().st_mtime_ns if path.exists() else 0
        compared = [file.stat().st_mtime_ns for file in self.folder.glob("compare/step-*.json")]
        return f"{written}-{len(self.files())}-{len(self.files('evaluations'))}-{compared}"

    def digests(self, where: str = "rollouts") -> list[Digest]:
        """The completions of each step, without their tokens."""
        files = self.files(where)
        if not files:
            return []
        headline = self.headline()
        return [self._digest(file, headline) for file in files.values()]

    def _digest(self, file: Path, headline: str) -> Digest:
        written = file.stat().st_mtime_ns
        if file not in self._digests or self._digests[file][0] != written:
            self._digests[file] = written, digest(file, headline)
        return self._digests[file][1]

    def headline(self) -> str:
        """The reward function that the run is judged by: its first; empty before there is a completion."""
        files = [*self.files("evaluations").values(), *self.files().values()]
        return next(iter(rewards_of(files[0])), "") if files else ""

    def records(self) -> list[Json]:
        """The lines of metrics.jsonl that are whole."""
        return [json.loads(line) for line in whole_lines(self.folder / "metrics.jsonl")]


def overview(run: RunFolder) -> Json:
    """Everything of a run but its completions in full."""
    records, rollouts, evaluations = run.records(), run.digests(), run.digests("evaluations")
    steps = [record for record in records if "reward" in record]
    return {
        "name": run.name,
        "about": _about(run.config, steps),
        "planned": run.config.steps,
        "headline": run.headline(),
        "rewards": rewards_of(next(iter(run.files().values()))) if rollouts else [],
        "group_size": run.config.group_size,
        "completions": sum(len(one.groups) for one in rollouts),
        "right": PASSED,
        "evaluations": [_score(one) for one in evaluations],
        "curves": _curves(steps),
        "held_out_curves": _curves([record for record in records if "reward" not in record]),
        "spread": {
            "completion_length": _spread(rollouts, [one.lengths for one in rollouts]),
            "reward": _spread(rollouts, [one.rewards for one in rollouts]),
        },
        "held_out": list(_held_out(evaluations)),
        "hardest": _hardest(rollouts),
        "steps": [one.step for one in rollouts],
        "tables": stored_tables(run.folder),
        "findings": [finding.as_dict() for finding in diagnose(read_run(run.folder))],
        "formula": [list(line) for line in equations(run.config.algorithm)],
        "legend": LEGEND,
    }


def groups_to_show(runs: Sequence[RunFolder], budget: int) -> list[dict[int, list[int]]]:
    """For each run, the groups to show in full, by step; together they have about `budget` tokens."""
    return [choose(run.digests(), budget // len(runs)) for run in runs]


def _about(config: Config, steps: Sequence[Json]) -> list[list[str]]:
    seconds = sum(record.get("seconds") or 0.0 for record in steps)
    return [
        ["Model", Path(config.model).name],
        ["Data", Path(config.data.path).name],
        ["Algorithm", _algorithm(config)],
        ["Steps", f"{len(steps)} of {config.steps}"],
        ["Each step", f"{config.prompts_per_step} prompts × {config.group_size} completions"],
        ["Longest completion", f"{config.sampling.max_tokens} tokens"],
        ["Learning rate", f"{config.optimizer.learning_rate:g}"],
        ["Seed", str(config.seed)],
        ["Training time", duration(seconds)],
    ]


def _algorithm(config: Config) -> str:
    """The name of the run's algorithm, or of the nearest preset and how far it is from that."""
    named = {"Groupwise's default": Algorithm(), **PRESETS}
    slots = {
        name: len(differences(config.algorithm, a.resolve(config.sampling.max_tokens))) for name, a in named.items()
    }
    nearest = min(slots, key=slots.__getitem__)
    changed = f", {slots[nearest]} slot{'s' if slots[nearest] > 1 else ''} changed"
    return nearest + (changed if slots[nearest] else "")


def duration(seconds: float) -> str:
    """For people: `47 s`, `12 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _score(one: Digest) -> Json:
    """One evaluation: the mean of its headline reward and the 95 % interval of that."""
    scores = np.nan_to_num(one.headline).reshape(len(set(one.groups.tolist())), -1)
    found = estimate(scores.mean(1))
    return {
        "step": one.step,
        **{name: _number(value) for name, value in found._asdict().items()},
        "prompts": len(scores),
        "completion_length": _number(float(one.lengths.mean())),
    }


def _curves(records: Sequence[Json]) -> Json:
    """`{"step": [...], metric: [...]}`; of a long run means of neighbours."""
    names = dict.fromkeys(name for record in records for name in record)
    chunks = np.array_split(np.arange(len(records)), min(len(records), MOST_POINTS)) if records else []
    return {name: [_mean([records[i].get(name) for i in chunk]) for chunk in chunks] for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    said = [value for value in values if value is not None]
    return _number(sum(said) / len(said)) if said else None


def _spread(digests: Sequence[Digest], values: Sequence[Floats]) -> Json | None:
    """How the values of each step are distributed: counts[columns][bins] over edges[bins + 1]."""
    finite = [one[np.isfinite(one)] for one in values]
    everything = np.concatenate(finite) if finite else np.zeros(0)
    if not len(everything):
        return None
    distinct = np.unique(everything)
    low, high = float(distinct[0]), float(distinct[-1])
    bins = min(BINS, max(len(distinct), 2))
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    chunks = np.array_split(np.arange(len(digests)), min(len(digests), COLUMNS))
    return {
        "edges": [_number(edge) for edge in edges],
        "steps": [[digests[chunk[0]].step, digests[chunk[-1]].step] for chunk in chunks],
        "counts": [np.histogram(np.concatenate([finite[i] for i in chunk]), edges)[0].tolist() for chunk in chunks],
        "means": [_number(float(np.concatenate([finite[i] for i in chunk]).mean())) for chunk in chunks],
    }


def _held_out(evaluations: Sequence[Digest]) -> Iterator[Json]:
    """The held-out prompts whose answers changed between right and wrong, and those that are still wrong."""
    if len(evaluations) < 2:
        return
    first, last = evaluations[0], evaluations[-1]
    before, after = first.means(), last.means()
    kinds: dict[str, list[int]] = {"solved": [], "unsolved": [], "lost": []}
    for group in before.keys() & after.keys():
        right = before[group] > PASSED, after[group] > PASSED
        kind = {(False, True): "solved", (False, False): "unsolved", (True, False): "lost"}.get(right)
        if kind is not None:
            kinds[kind].append(group)
    for kind, groups in kinds.items():
        for group in sorted(groups)[:MOST_PROMPTS]:
            places = [int(np.flatnonzero(one.groups == group)[0]) for one in (first, last)]
            shown = [_answer(one, place) for one, place in zip((first, last), places, strict=True)]
            prompt = question(first.prompts[places[0]])
            yield {"kind": kind, "of": len(groups), "prompt": prompt, "before": shown[0], "after": shown[1]}


def _answer(one: Digest, place: int) -> Json:
    return {
        "text": one.texts[place][: 4 * 1000],
        "score": _number(float(one.headline[place])),
        "length": int(one.lengths[place]),
        "truncated": bool(one.truncated[place]),
    }


def _hardest(digests: Sequence[Digest]) -> list[Json]:
    """The training prompts that did worst when last tried; of equals the later, which had the better policy, first."""
    last: dict[str, Json] = {}
    for one in digests:
        firsts = dict(zip(one.groups[::-1].tolist(), reversed(one.prompts), strict=True))
        for group, mean in one.means().items():
            prompt = firsts[group]
            tried = last.get(prompt, {"tries": 0})["tries"] + 1
            last[prompt] = {"prompt": prompt, "step": one.step, "group": group, "mean": _number(mean), "tries": tried}
    worst = sorted(last.values(), key=lambda prompt: (prompt["mean"], -prompt["step"]))[:MOST_PROMPTS]
    return [{**prompt, "prompt": question(prompt["prompt"])} for prompt in worst]


def _number(value: float | None) -> float | None:
    """Short, and only what JSON can spell."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
