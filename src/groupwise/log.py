"""What a run tells: one line a step on the terminal, `metrics.jsonl`, and every completion in `*/step-*.parquet`.

The files can be read while the run writes them: a line or a file appears only when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from groupwise.algorithms import zero_variance
from groupwise.chat import Chat
from groupwise.diagnosis import diagnose, read_run
from groupwise.errors import CheckpointError, NumericalError, RewardError
from groupwise.evaluate import Scores
from groupwise.files import append, write_whole, writing
from groupwise.guards import HISTORY, Guards
from groupwise.records import Batch, Rollout
from groupwise.trackers import Tracker

Metrics = dict[str, float]
Faults = Counter[tuple[str, str]]
"""How often each (reward function, cause) was met."""
DIAGNOSE_EVERY = 10
"""Steps between two looks at the run so far."""
GUARDS = Guards()


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
    ages = [step - rollout.policy_version for rollout in rollouts]
    return {
        "reward": _mean(rewards),
        **{f"reward/{name}": _mean([r.rewards[name] for r in rollouts if name in r.rewards]) for name in names},
        "reward_std": _mean([float(np.std(group, ddof=1)) for group in groups.values() if len(group) > 1]),
        "frac_reward_zero_std": _mean(zero_variance(valid)),
        "completion_length": _mean(lengths),
        "truncated": _mean([rollout.truncated for rollout in rollouts]),
        "invalid": _mean([not rollout.valid for rollout in rollouts]),
        **{f"invalid/{name}": 0.0 for name in names},
        **_invalid(_faults(rollouts), len(rollouts)),
        "entropy": _mean(np.concatenate(sampled)) if sampled else math.nan,
        "age": float(max(ages)),
        "age/mean": _mean(ages),
        "completion_tokens": float(sum(lengths)),
    }


def _faults(rollouts: Sequence[Rollout]) -> Faults:
    return Counter(fault for rollout in rollouts for fault in rollout.faults.items())


def _invalid(faults: Faults, completions: int) -> Metrics:
    """The share of completions on which a reward function has no verdict, in all and for each cause."""
    rates: Metrics = {}
    for (name, cause), count in sorted(faults.items()):
        rates[f"invalid/{name}"] = rates.get(f"invalid/{name}", 0.0) + count / completions
        rates[f"invalid/{name}/{cause}"] = count / completions
    return rates


def _in_words(faults: Faults, completions: int) -> str:
    """`math_answer 17.0% (raised 10.0%, timeout 7.0%)` for each reward function that had faults."""
    rates = _invalid(faults, completions)
    words: list[str] = []
    for name in dict.fromkeys(name for name, _ in sorted(faults)):
        whole = f"invalid/{name}"
        causes = [f"{cause} {rates[f'{whole}/{cause}']:.1%}" for by, cause in sorted(faults) if by == name]
        words.append(f"{name} {rates[whole]:.1%} ({', '.join(causes)})")
    return ", ".join(words)


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
        trackers: Sequence[Tracker] = (),
        guards: Guards = GUARDS,
    ) -> None:
        self.folder, self.steps, self.headline = folder, steps, headline
        self.done = 0
        """Steps written down."""
        self.skipped = 0
        """Updates left out so far, of the whole run."""
        self.console = console or Console(stderr=True)
        self.chat, self._max_invalid, self._guards = chat, max_invalid_fraction, guards
        self._grad_norms: deque[float] = deque(maxlen=HISTORY)
        self._trackers = trackers
        self._laps: dict[str, float] = {}
        self._noted: Metrics = {}
        self._lap_began = time.perf_counter()
        self._warned: set[str] = set()
        self._faults, self._completions = Faults(), 0
        self._progress: Progress | None = None
        self._first: tuple[float, int] | None = None  # (when, which) the first step shown was done
        with writing(folder):
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

    def begin_lap(self) -> None:
        """What took the time until now is no part of a step."""
        self._lap_began = time.perf_counter()

    def note(self, metrics: Metrics) -> None:
        """Numbers that belong into the record of the step under way."""
        self._noted.update(metrics)

    def rewind(self, steps_done: int) -> list[Metrics]:
        """Forget what was logged after `steps_done` steps, before a run continues from there; the records that stay.

        The evaluation after the last step is forgotten, too: it follows the last checkpoint, so it is made again.  So
        is the one before the first step, by a run that begins again.

        Raises:
            CheckpointError: a line of metrics.jsonl is no record.
        """
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut short
        records = [self._read_record(number, line) for number, line in enumerate(whole, 1)]
        kept = [
            (line, record)
            for line, record in zip(whole, records, strict=True)
            if steps_done > 0 and record["step"] <= steps_done and not self._is_final(record)
        ]
        write_whole(path, "".join(line for line, _ in kept).encode())
        for file in self.folder.glob("*/step-*.parquet"):
            step, again = int(file.stem.removeprefix("step-")), steps_done in (0, self.steps)
            if step > steps_done or (file.parent.name == "evaluations" and step == steps_done and again):
                file.unlink()
        self.done = steps_done
        self.skipped = int(sum(record.get("skipped_updates", 0.0) for _, record in kept))
        norms = [record.get("grad_norm") for _, record in kept]
        self._grad_norms.clear()
        self._grad_norms.extend(norm for norm in norms if norm)
        return [record for _, record in kept]

    def _read_record(self, number: int, line: str) -> Metrics:
        try:
            record = json.loads(line)
            return {**record, "step": int(record["step"])}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder / 'metrics.jsonl'}: line {number} is damaged; delete that line to continue without it"
            ) from error

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

    def refuse(self, step: int, update: int, batch: Batch, problem: str) -> None:
        """Keep the batch of an update that was not finite as safetensors, say so, and leave the update out.

        Raises:
            NumericalError: `guards.max_skipped_updates` were left out already.
        """
        path = self.folder / "offending" / f"step-{step + 1:05d}.{update + 1}.safetensors"
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        tensors = {name: tensor.contiguous() for name, tensor in fields.items() if tensor is not None}
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, safetensors.torch.save(tensors))
        most = self._guards.max_skipped_updates
        text = f"step {step + 1}, update {update + 1}: {problem}; its batch is {path}"
        if self.skipped >= most:
            raise NumericalError(
                f"{text}. Mend its cause, lower optimizer.learning_rate, set engine.dtype: float32, or leave such "
                f"updates out with guards.max_skipped_updates (now {most})"
            )
        self.skipped += 1
        self.warn(f"{text}; the update is left out, number {self.skipped} of at most {most}")

    def _warn_of(self, problems: Sequence[str], consequence: str) -> None:
        for problem in problems:
            # The words of an exception may differ from sample to sample; the reward and what it did are the kind.
            self.warn(f"{problem}; {consequence}", kind=": ".join([*problem.split(": ")[:2], consequence]))

    def step(self, step: int, rollouts: Sequence[Rollout], updates: Sequence[Mapping[str, float]]) -> None:
        """Write the files of a step and show its line; `updates` are the metrics of its optimizer steps, empty for one
        that was left out."""
        metrics = describe(rollouts, step)
        left_out = sum(not update for update in updates)
        if left_out:
            metrics["skipped_updates"] = float(left_out)
        for name in dict.fromkeys(name for update in updates for name in update):
            metrics[name] = _mean([update[name] for update in updates if name in update])
        seconds = sum(self._laps.values())
        metrics["seconds"] = seconds
        metrics.update({f"seconds/{phase}": taken for phase, taken in self._laps.items()})
        metrics["tokens_per_second"] = metrics["completion_tokens"] / max(seconds, 1e-9)
        metrics.update(self._noted)
        metrics.update(peak_memory())
        self._laps, self._noted = {}, {}
        self._write("rollouts", step + 1, rollouts)
        self._append({"step": step + 1, **metrics})
        self.done = step + 1
        self._show(step + 1, metrics, _in_words(_faults(rollouts), len(rollouts)))
        self._faults.update(_faults(rollouts))
        self._completions += len(rollouts)
        if not updates:
            self.warn(
                f"step {step + 1} left nothing to learn from, so nothing was updated: all rewards were equal in "
                f"{metrics['frac_reward_zero_std']:.0%} of its completions' groups, and {metrics['truncated']:.0%} of "
                "its completions were truncated",
                kind="nothing was updated",
            )
        for kind, text in self._guards.warnings(metrics, self._grad_norms):
            self.warn(f"step {step + 1}: {text}", kind)
        self._grad_norms.extend([metrics["grad_norm"]] if metrics.get("grad_norm") else [])
        self.lap("log")  # known only now, so it is in the record of the next step

    def diagnose(self, steps_done: int) -> None:
        """Every few steps, and after the last: say once what a diagnosis of the run so far finds wrong."""
        if steps_done % DIAGNOSE_EVERY and steps_done != self.steps:
            return
        for finding in diagnose(read_run(self.folder)):
            if finding.severity != "note" and finding.rule not in self._warned:
                self._warned.add(finding.rule)
                text = f"doctor: {finding.title} ({finding.evidence}). Try: {finding.advice}"
                self.console.print(text, style="magenta", highlight=False, markup=False, soft_wrap=True)
        self.lap("log")

    def evaluation(self, steps_done: int, scores: Scores) -> None:
        """Write and show an evaluation after `steps_done` steps."""
        self._write("evaluations", steps_done, scores.rollouts)
        self._append({"step": steps_done, **{f"eval/{name}": mean for name, mean in scores.means.items()},
                      **{f"eval/{name}": mean for name, mean in scores.at_k.items()},
                      "eval/completion_length": scores.completion_length})  # fmt: skip
        self._warn_of(
            [rollout.problem for rollout in scores.rollouts if not rollout.valid],
            "such held-out completions count as 0",
        )
        low, high = scores.interval
        self.say(
            f"held-out {self.headline} after {steps_done} steps: {scores.headline:.1%}  "
            f"(95% interval {low:.1%} to {high:.1%}, {scores.prompts} prompts, "
            f"{scores.completion_length:.0f} tokens each{_largest_k(scores.at_k)})"
        )
        self.begin_lap()

    def close(self) -> None:
        """Take the progress bar off the terminal, say how often rewards failed, and end what the trackers write."""
        for tracker in self._trackers:
            tracker.close()
        if self._progress is not None:
            self._progress.stop()
        if self._faults:
            rates = _in_words(self._faults, self._completions)
            self.say(f"without a verdict, of {self._completions} completions: {rates}; they were left out")

    def _show(self, done: int, m: Metrics, faults: str) -> None:
        width = len(str(self.steps))
        line = (
            f"step {done:>{width}}/{self.steps}  reward {m['reward']:6.3f}  "
            f"{self.headline} {m.get('reward/' + self.headline, math.nan):6.1%}  "
            f"length {m['completion_length']:6.1f}  zero-std {m['frac_reward_zero_std']:4.0%}  "
            f"{m['tokens_per_second']:7.0f} tok/s  left {self._time_left(done)}"
            f"{'  invalid: ' + faults if faults else ''}"
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
        append(self.folder / "metrics.jsonl", json.dumps(finite))
        numbers = {name: value for name, value in finite.items() if value is not None and name != "step"}
        for tracker in self._trackers:
            tracker.log(int(record["step"]), numbers)

    def _write(self, where: str, step: int, rollouts: Sequence[Rollout]) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table(step, rollouts, self.chat), sink)
        write_whole(self.folder / where / f"step-{step:05d}.parquet", sink.getvalue().to_pybytes())


def table(step: int, rollouts: Sequence[Rollout], chat: Chat) -> pa.Table:
    """One row a completion; every list has an entry for each token, those of the prompt included."""
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    optional = ("entropies", "old_logprobs", "ref_logprobs", "new_logprobs", "values", "advantages")
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
            **_steps(rollouts),
            **({"greedy_reward": greedy} if any(greedy := [r.greedy_reward for r in rollouts]) else {}),
            "advantage": [_first_advantage(r) for r in rollouts],
            "valid": [r.valid for r in rollouts],
            "problem": [r.problem for r in rollouts],
            **{f"fault/{name}": pa.array([r.faults.get(name) for r in rollouts], pa.string()) for name in names},
            "finish_reason": [str(r.finish_reason) for r in rollouts],
            "policy_version": [r.policy_version for r in rollouts],
            "tokens": [r.tokens for r in rollouts],
            "pieces": [chat.pieces(r.tokens) for r in rollouts],
            "loss_mask": [r.loss_mask for r in rollouts],
            "logprobs": [r.logprobs for r in rollouts],
            **{name: [getattr(r, name) for r in rollouts] for name in known},
        }
    )


def _steps(rollouts: Sequence[Rollout]) -> dict[str, list[list[dict[str, float]]]]:
    """The column with the rewards of steps, where there are any."""
    rewards = [[{"token": token, "reward": reward} for token, reward in r.step_rewards] for r in rollouts]
    return {"step_rewards": rewards} if any(rewards) else {}


def _largest_k(at_k: Mapping[str, float]) -> str:
    """`, pass@8 71.0%, maj@8 64.2%`: those of all samples."""
    kinds = {name.partition("@")[0]: f", {name} {mean:.1%}" for name, mean in at_k.items()}
    return "".join(kinds.values())


def peak_memory() -> Metrics:
    """The most memory held so far, in GiB: by this process, and on its GPU where it has one."""
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in, in bytes
    peak = {"memory/host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    return peak | ({"memory/gpu": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_initialized() else {})


def _first_advantage(rollout: Rollout) -> float | None:
    return None if rollout.advantages is None else float(rollout.advantages[rollout.loss_mask][:1].sum())


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
