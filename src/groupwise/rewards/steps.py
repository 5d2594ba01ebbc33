"""Rewards for the steps of a completion: what a function returns to give them, and how a text falls into steps."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRewards:
    r"""A reward for each step of a completion, and one for all of it.

    `StepRewards(0.2, ((7, 0.9), (19, 0.2)))`: the first step ends after 7 characters of `Rollout.text` and earned 0.9,
    the second after 19 and earned 0.2; the completion as a whole counts 0.2.
    """

    value: float
    """The reward of the completion: what metrics show, and what `supervision: outcome` learns from."""
    steps: tuple[tuple[int, float], ...]
    """(how many characters of the text it takes to its end, its reward) of each step, in order."""

    def problem(self, text: str) -> str:
        """What is wrong with these steps of this text; empty when nothing is."""
        ends = [end for end, _ in self.steps]
        if not ends:
            return "there are no steps; give at least one, which ends after the whole text"
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > len(text):
            return f"the steps end after {ends} of {len(text)} characters; accepted: ascending, none beyond the last"
        given = [self.value, *(reward for _, reward in self.steps)]
        return next((f"there is {number}" for number in given if not math.isfinite(number)), "")


def split_steps(text: str, separator: str) -> list[tuple[int, str]]:
    """(how many characters it takes to the end of the step, what it says) of each step of a text.

    A step ends with the last thing that it says: a separator leads to the next one, and tokens often join the two.  The
    last step ends with the text.  What a step says is without the white space around it; a part that says nothing is
    no step, but a text that says nothing is one.
    """
    steps: list[tuple[int, str]] = []
    begin = 0
    for part in text.split(separator):
        if part.strip():
            steps.append((begin + len(part.rstrip()), part.strip()))
        begin += len(part) + len(separator)
    return [*steps[:-1], (len(text), steps[-1][1] if steps else "")]
