"""What a run tells: one line a step on the terminal, `metrics.jsonl`, and every completion in `*/step-*.parquet`.

The files can be read while the run writes them: a line or a file appears only when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from groupwise.algorithms import zero_variance
from groupwise.chat import Chat
from groupwise.errors import CheckpointError, RewardError
from groupwise.evaluate import Scores
from groupwise.records import Rollout

Metrics = dict[str, float]
MISMATCH_LIMIT = 0.01
"""Mean |log-prob| difference between sampler and learner above which the run says so (nats)."""


def describe(rollouts: Sequence[Rollout], step: int) -> Metrics:
    """The metrics of a step's rollouts; `reward_std` is the mean spread within a group.  `docs/metrics.md` has each."""
    valid = [rollout for rollout in rollouts if rollout.valid]
    rewards = [rollout.reward for rollout in valid]
    groups: dict[int, list[float]] = {}
    for rollout in valid:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    sampled = [r.entropies[r.loss_mask] for r in rollouts if r.entropies is not None]
    lengths = [rollout.num_completion_tokens for rollout in rollouts]
    return {
        "reward": _mean(rewards),
        **{f"reward/{name}": _mean([r.rewards[name] for r in rollouts if name in r.rewards]) for name in names},
        "reward_std": _mean([float(np.std(group, ddof=1)) for group in groups.values() if len(group) > 1]),
        "frac_reward_zero_std": _mean(zero_variance(valid)),
        "completion_length": _mean(lengths),
        "truncated": _mean([rollout.truncated for rollout in rollouts]),
        "invalid": _mean([not rollout.valid for rollout in rollouts]),
        "entropy": _mean(np.concatenate(sampled)) if sampled else math.nan,
        "age": float(step - min(rollout.policy_version for rollout in rollouts)),
        "completion_tokens": float(sum(lengths)),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float:
    said = [float(value) for value in values if math.isfinite(value)]
    return sum(said) / len(said) if said else math.nan


class RunLog:
    """The run folder and the terminal of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        headline: str,
        chat: Chat,
        console: Console | None = None,
        max_invalid_fraction: float = 1.0,
    ) -> None:
        self.folder, self.steps, self.headline = folder, steps, headline
        self.console = console or Console(stderr=True)
        self.chat, self._max_invalid = chat, max_invalid_fraction
        self._laps: dict[str, float] = {}
        self._lap_began = time.perf_counter()
        self._warned: set[str] = set()
        self._progress: Progress | None = None
        self._first: tuple[float, int] | None = None  # (when, which) the first step shown was done
        for name in ("rollouts", "evaluations"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """One line on the terminal, above the progress bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str, kind: str = "") -> None:
        """The same, marked as a warning and only once for each kind (by default the text itself)."""
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            self.console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent on this phase."""
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._lap_began
        self._lap_began = now

    def rewind(self, steps_done: int) -> None:
        """Forget what was logged after `steps_done` steps, before a run continues from there.

        The evaluation after the last step is forgotten, too: it follows the last checkpoint, so it is made again.
        """
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [(line, json.loads(line)) for line in lines if line.endswith("\n")]  # the last may have been cut short
        kept = [line for line, record in whole if record["step"] <= steps_done and not self._is_final(record)]
        _write_whole(path, "".join(kept).encode())
        for file in self.folder.glob("*/step-*.parquet"):
            step = int(file.stem.removeprefix("step-"))
            if step > steps_done or (file.parent.name == "evaluations" and step == self.steps):
                file.unlink()

    def _is_final(self, record: Mapping[str, float]) -> bool:
        return record["step"] == self.steps and any(name.startswith("eval/") for name in record)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Say which rollouts have no trustworthy reward, and stop the run when they are too many.

        Raises:
            RewardError: more than `max_invalid_fraction` of the rollouts are not valid.
        """
        problems = [rollout.problem for rollout in rollouts if not rollout.valid]
        self._warn_of(problems, "such completions are left out of the statistics and of the loss")
        fraction = len(problems) / max(len(rollouts), 1)
        if fraction > self._max_invalid:
            raise RewardError(
                f"{len(problems)} of {len(rollouts)} completions have no trustworthy reward, more than "
                f"max_invalid_fraction: {self._max_invalid}; the first problem: {problems[0]}; mend the reward "
                "function, or raise max_invalid_fraction to train on the rest"
            )

    def _warn_of(self, problems: Sequence[str], consequence: str) -> None:
        for problem in problems:
            # The words of an exception may differ from sample to sample; the reward and what it did are the kind.
            self.warn(f"{problem}; {consequence}", kind=": ".join([*problem.split(": ")[:2], consequence]))

    def step(self, step: int, rollouts: Sequence[Rollout], updates: Sequence[Mapping[str, float]]) -> None:
        """Write the files of a step and show its line; `updates` are the metrics of its optimizer steps."""
        metrics = describe(rollouts, step)
        for name in dict.fromkeys(name for update in updates for name in update):
            metrics[name] = _mean([update[name] for update in updates if name in update])
        seconds = sum(self._laps.values())
        metrics["seconds"] = seconds
        metrics.update({f"seconds/{phase}": taken for phase, taken in self._laps.items()})
        metrics["tokens_per_second"] = metrics["completion_tokens"] / max(seconds, 1e-9)
        metrics.update(peak_memory())
        self._laps = {}
        self._write("rollouts", step + 1, rollouts)
        self._append({"step": step + 1, **metrics})
        self._show(step + 1, metrics)
        if not updates:
            self.warn(
                f"step {step + 1} left nothing to learn from, so nothing was updated: all rewards were equal in "
                f"{metrics['frac_reward_zero_std']:.0%} of its completions' groups, and {metrics['truncated']:.0%} of "
                "its completions were truncated",
                kind="nothing was updated",
            )
        if metrics.get("sampler_mismatch", 0.0) > MISMATCH_LIMIT:
            self.warn(
                f"sampler and learner disagree on log-probs by {metrics['sampler_mismatch']:.3g} nats a token (step "
                f"{step + 1}); use the same dtype for both, or algorithm.correction: importance"
            )
        self.lap("log")  # known only now, so it is in the record of the next step

    def evaluation(self, steps_done: int, scores: Scores) -> None:
        """Write and show an evaluation after `steps_done` steps."""
        self._write("evaluations", steps_done, scores.rollouts)
        self._append({"step": steps_done, **{f"eval/{name}": mean for name, mean in scores.means.items()},
                      "eval/completion_length": scores.completion_length})  # fmt: skip
        self._warn_of(
            [rollout.problem for rollout in scores.rollouts if not rollout.valid],
            "such held-out completions count as 0",
        )
        low, high = scores.interval
        self.say(
            f"held-out {self.headline} after {steps_done} steps: {scores.headline:.1%}  "
            f"(95% interval {low:.1%} to {high:.1%}, {scores.prompts} prompts, "
            f"{scores.completion_length:.0f} tokens each)"
        )
        self._lap_began = time.perf_counter()

    def close(self) -> None:
        """Take the progress bar off the terminal."""
        if self._progress is not None:
            self._progress.stop()

    def _show(self, done: int, m: Metrics) -> None:
        width = len(str(self.steps))
        line = (
            f"step {done:>{width}}/{self.steps}  reward {m['reward']:6.3f}  "
            f"{self.headline} {m.get('reward/' + self.headline, math.nan):6.1%}  "
            f"length {m['completion_length']:6.1f}  zero-std {m['frac_reward_zero_std']:4.0%}  "
            f"{m['tokens_per_second']:7.0f} tok/s  left {self._time_left(done)}"
        )
        if not self.console.is_terminal:
            self.say(line)
            return
        if self._progress is None:
            columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%  time left"), TimeRemainingColumn())
            self._progress = Progress(TextColumn("training"), *columns, console=self.console, transient=True)
            self._progress.add_task("", total=self.steps, completed=done - 1)
            self._progress.start()
        self.say(line)
        self._progress.update(self._progress.task_ids[0], completed=done)

    def _time_left(self, done: int) -> str:
        now = time.perf_counter()
        self._first = self._first or (now, done)
        began, first = self._first
        if done == first:
            return "  -:--"
        seconds = (now - began) / (done - first) * (self.steps - done)
        return f"{seconds // 60:3.0f}:{seconds % 60:02.0f}"

    def _append(self, record: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(finite) + "\n")

    def _write(self, where: str, step: int, rollouts: Sequence[Rollout]) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table(step, rollouts, self.chat), sink)
        _write_whole(self.folder / where / f"step-{step:05d}.parquet", sink.getvalue().to_pybytes())


def table(step: int, rollouts: Sequence[Rollout], chat: Chat) -> pa.Table:
    """One row a completion; every list has an entry for each token, those of the prompt included."""
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    optional = ("entropies", "old_logprobs", "ref_logprobs", "new_logprobs", "advantages")
    known = [name for name in optional if any(getattr(r, name) is not None for r in rollouts)]
    return pa.table(
        {
            "step": [step] * len(rollouts),
            "group": [r.group for r in rollouts],
            "prompt": [chat.prompt_text(r) for r in rollouts],
            "text": [r.text for r in rollouts],
            "length": [r.num_completion_tokens for r in rollouts],
            "reward": [r.reward for r in rollouts],
            **{f"reward/{name}": [r.rewards.get(name) for r in rollouts] for name in names},
            "advantage": [_first_advantage(r) for r in rollouts],
            "valid": [r.valid for r in rollouts],
            "problem": [r.problem for r in rollouts],
            "finish_reason": [str(r.finish_reason) for r in rollouts],
            "policy_version": [r.policy_version for r in rollouts],
            "tokens": [r.tokens for r in rollouts],
            "pieces": [chat.pieces(r.tokens) for r in rollouts],
            "loss_mask": [r.loss_mask for r in rollouts],
            "logprobs": [r.logprobs for r in rollouts],
            **{name: [getattr(r, name) for r in rollouts] for name in known},
        }
    )


def peak_memory() -> Metrics:
    """The most memory held so far, in GiB: by this process, and on its GPU where it has one."""
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in, in bytes
    peak = {"memory/host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    return peak | ({"memory/gpu": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_initialized() else {})


def _first_advantage(rollout: Rollout) -> float | None:
    return None if rollout.advantages is None else float(rollout.advantages[rollout.loss_mask][:1].sum())


def _write_whole(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(content)
    os.replace(beside, path)


def new_folder(folder: Path) -> Path:
    """An empty run folder.

    Raises:
        CheckpointError: there is a run in it already, or it cannot be made.
    """
    if (folder / "config.yaml").exists():
        raise CheckpointError(
            f"{folder}: holds a run already; continue it with `groupwise train --resume {folder}`, or choose another "
            "folder with output=DIR"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be made a run folder: {error.strerror}; choose another with output=DIR"
        ) from error
    return folder
