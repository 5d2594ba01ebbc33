"""Rewards for the steps of a completion: what a function returns to give them, and how a text falls into steps."""

from __future__ import annotations

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
            return (
                f"the steps end after {ends} characters of {len(text)}; ends ascend, from 0 to the length of the text"
            )
        return ""


def split_steps(text: str, separator: str) -> list[tuple[int, str]]:
    """(how many characters it takes to the end of the step, what it says) of each step of a text.

    A separator belongs to the step that it ends.  Parts that are blank are no steps of their own, and a text that is
    blank is one step.  What a step says is without the white space around it.
    """
    steps: list[tuple[int, str]] = []
    end = 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((end, part.strip()))
        elif steps:
            steps[-1] = (end, steps[-1][1])
    return steps or [(len(text), text.strip())]
