"""What a run tells: one line a step on the terminal, `metrics.jsonl`, and every completion in `*/step-*.parquet`.

terminal     what is shown while it goes on
metrics      the numbers of a step
journal      the file with the numbers
completions  the files with the completions

The files can be read while the run writes them: a line or a file appears only when it is whole.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
from rich.console import Console

from groupwise import completions
from groupwise.chat import Chat
from groupwise.diagnosis import diagnose, read_run
from groupwise.errors import CheckpointError, NumericalError, RewardError
from groupwise.evaluate import Scores
from groupwise.files import write_whole, writing
from groupwise.guards import HISTORY, Guards
from groupwise.journal import Journal
from groupwise.metrics import Faults, Laps, Metrics, describe, faults_of, in_words, of_updates, peak_memory
from groupwise.records import Batch, Rollout
from groupwise.terminal import Terminal
from groupwise.trackers import Tracker

DIAGNOSE_EVERY = 10
"""Steps between two looks at the run so far."""
GUARDS = Guards()


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
        self.folder, self.steps, self.chat = folder, steps, chat
        self.done = 0
        """Steps written down."""
        self.skipped = 0
        """Updates left out so far, of the whole run."""
        self._terminal = Terminal(console, steps=steps, headline=headline)
        self._journal = Journal(folder, trackers)
        self._laps, self._noted = Laps(), Metrics()
        self._max_invalid, self._guards = max_invalid_fraction, guards
        self._grad_norms: deque[float] = deque(maxlen=HISTORY)
        self._faults, self._completions = Faults(), 0
        completions.make_folders(folder)

    def say(self, text: str) -> None:
        """One line on the terminal, above the progress bar."""
        self._terminal.say(text)

    def warn(self, text: str, kind: str = "") -> None:
        """The same, marked as a warning and only once for each kind (by default the text itself)."""
        self._terminal.warn(text, kind)

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent on this phase."""
        self._laps.end(phase)

    def begin_lap(self) -> None:
        """What took the time until now is no part of a step."""
        self._laps.begin()

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

        def stays(record: Mapping[str, float]) -> bool:
            return steps_done > 0 and record["step"] <= steps_done and not self._is_final(record)

        kept = self._journal.keep(stays)
        evaluated_again = steps_done in (0, self.steps)
        completions.forget(self.folder, "rollouts", after=steps_done)
        completions.forget(self.folder, "evaluations", after=steps_done - 1 if evaluated_again else steps_done)
        self.done = steps_done
        self.skipped = int(sum(record.get("skipped_updates", 0.0) for record in kept))
        norms = [record.get("grad_norm") for record in kept]
        self._grad_norms.clear()
        self._grad_norms.extend(norm for norm in norms if norm)
        return kept

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
        metrics = describe(rollouts, step) | of_updates(updates) | self._laps.take()
        metrics["tokens_per_second"] = metrics["completion_tokens"] / max(metrics["seconds"], 1e-9)
        metrics |= self._noted | peak_memory()
        self._noted = {}
        self._write("rollouts", step + 1, rollouts)
        self._journal.write({"step": step + 1, **metrics})
        self.done = step + 1
        faults = faults_of(rollouts)
        self._terminal.step(step + 1, metrics, in_words(faults, len(rollouts)))
        self._faults.update(faults)
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
            if finding.severity != "note":
                self._terminal.advise(finding)
        self.lap("log")

    def evaluation(self, steps_done: int, scores: Scores) -> None:
        """Write and show an evaluation after `steps_done` steps."""
        self._write("evaluations", steps_done, scores.rollouts)
        figures = {**scores.means, **scores.at_k, "completion_length": scores.completion_length}
        self._journal.write({"step": steps_done, **{f"eval/{name}": mean for name, mean in figures.items()}})
        self._warn_of(
            [rollout.problem for rollout in scores.rollouts if not rollout.valid],
            "such held-out completions count as 0",
        )
        self._terminal.evaluation(steps_done, scores)
        self.begin_lap()

    def close(self) -> None:
        """Take the progress bar off the terminal, say how often rewards failed, and end what the trackers write."""
        self._journal.close()
        self._terminal.close()
        if self._faults:
            rates = in_words(self._faults, self._completions)
            self.say(f"without a verdict, of {self._completions} completions: {rates}; they were left out")

    def _write(self, kind: str, step: int, rollouts: Sequence[Rollout]) -> None:
        completions.write(self.folder, kind, step, rollouts, self.chat)


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
