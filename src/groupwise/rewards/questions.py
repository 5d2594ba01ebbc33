"""What rewards are asked, the calls that this takes, and the verdicts that are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from groupwise.chat import Prompt
from groupwise.records import Rollout
from groupwise.rewards.calls import Verdict, is_together
from groupwise.rewards.reward import Reward

RETRIED = ("raised", "timeout", "crashed")
"""What may go better the next time; what a function returned is its answer."""
Outcome = list[Verdict] | Verdict
"""A verdict on each rollout of a call, or one on the call when all of it failed."""


@dataclass(frozen=True)
class Question:
    """What a reward is asked: a verdict on each of some rollouts."""

    reward: Reward
    rollouts: Sequence[Rollout]
    prompts: Sequence[Prompt]
    """Aligned with `rollouts`."""


@dataclass(frozen=True)
class Call:
    """One call of a reward function, for the rollouts at `places` of a question."""

    question: Question
    places: tuple[int, ...]
    tries: int = 0

    @property
    def rollouts(self) -> list[Rollout]:
        return [self.question.rollouts[place] for place in self.places]

    @property
    def prompts(self) -> list[Prompt]:
        return [self.question.prompts[place] for place in self.places]


class Ledger:
    """The calls that a question still needs, and the verdicts that are in."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.said: dict[int, dict[int, Verdict]] = {id(question): {} for question in questions}
        self.calls = deque(one for question in questions for one in _calls(question))

    def settle(self, done: Call, outcome: Outcome) -> None:
        """Note what a call brought, and what has to be asked again: a list that failed, one by one."""
        question = done.question
        if isinstance(outcome, Verdict) and len(done.places) > 1:
            self.calls.extend(Call(question, (place,), done.tries) for place in done.places)
            return
        verdicts = [outcome] if isinstance(outcome, Verdict) else outcome
        for place, verdict in zip(done.places, verdicts, strict=True):
            if verdict.cause in RETRIED and done.tries < question.reward.retries:
                self.calls.append(Call(question, (place,), done.tries + 1))
            else:
                self.said[id(question)][place] = verdict

    def verdicts(self, question: Question) -> list[Verdict]:
        """One for each rollout, in order."""
        said = self.said[id(question)]
        return [said[place] for place in range(len(question.rollouts))]


def _calls(question: Question) -> Iterator[Call]:
    places = tuple(range(len(question.rollouts)))
    if places and is_together(question.reward.title, question.reward.use):
        return iter((Call(question, places),))
    return (Call(question, (place,)) for place in places)
