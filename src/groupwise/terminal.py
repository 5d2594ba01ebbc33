"""What is shown while a run goes on: lines, above a progress bar where they go to a real terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from groupwise.diagnosis import Finding
from groupwise.evaluate import Scores
from groupwise.metrics import Metrics


class Terminal:
    """The terminal of one run."""

    def __init__(self, console: Console | None, *, steps: int, headline: str) -> None:
        self._console = console or Console(stderr=True)
        self._steps, self._headline = steps, headline
        self._said: set[str] = set()
        self._progress: Progress | None = None
        self._first: tuple[float, int] | None = None  # (when, which) the first step shown was done

    def say(self, text: str) -> None:
        """One line, above the progress bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str, kind: str = "") -> None:
        """The same, marked as a warning and only once for each kind (by default the text itself)."""
        self._say_once(kind or text, f"warning: {text}", "yellow")

    def advise(self, finding: Finding) -> None:
        """What the doctor has found, once for each of its rules."""
        self._say_once(finding.rule, f"doctor: {finding.title} ({finding.evidence}). Try: {finding.advice}", "magenta")

    def _say_once(self, kind: str, text: str, style: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def step(self, done: int, m: Metrics, faults: str) -> None:
        """The line of a step; `faults` says in words what has no verdict."""
        width = len(str(self._steps))
        line = (
            f"step {done:>{width}}/{self._steps}  reward {m['reward']:6.3f}  "
            f"{self._headline} {m.get('reward/' + self._headline, math.nan):6.1%}  "
            f"length {m['completion_length']:6.1f}  zero-std {m['frac_reward_zero_std']:4.0%}  "
            f"{m['tokens_per_second']:7.0f} tok/s  left {self._time_left(done)}"
            f"{'  invalid: ' + faults if faults else ''}"
        )
        if not self._console.is_terminal:
            self.say(line)
            return
        if self._progress is None:
            columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%  time left"), TimeRemainingColumn())
            self._progress = Progress(TextColumn("training"), *columns, console=self._console, transient=True)
            self._progress.add_task("", total=self._steps, completed=done - 1)
            self._progress.start()
        self.say(line)
        self._progress.update(self._progress.task_ids[0], completed=done)

    def _time_left(self, done: int) -> str:
        now = time.perf_counter()
        self._first = self._first or (now, done)
        began, first = self._first
        if done == first:
            return "  -:--"
        seconds = (now - began) / (done - first) * (self._steps - done)
        return f"{seconds // 60:3.0f}:{seconds % 60:02.0f}"

    def evaluation(self, steps_done: int, scores: Scores) -> None:
        """The line of an evaluation."""
        low, high = scores.interval
        self.say(
            f"held-out {self._headline} after {steps_done} steps: {scores.headline:.1%}  "
            f"(95% interval {low:.1%} to {high:.1%}, {scores.prompts} prompts, "
            f"{scores.completion_length:.0f} tokens each{_largest_k(scores.at_k)})"
        )

    def close(self) -> None:
        """Take the progress bar off."""
        if self._progress is not None:
            self._progress.stop()


def _largest_k(at_k: Mapping[str, float]) -> str:
    """`, pass@8 71.0%, maj@8 64.2%`: those of all samples."""
    kinds = {name.partition("@")[0]: f", {name} {mean:.1%}" for name, mean in at_k.items()}
    return "".join(kinds.values())
