"""Which answers of a group are the same answer, as the reward that grades them sees it: what a majority is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from groupwise.records import Rollout
from groupwise.rewards.questions import Question
from groupwise.rewards.reward import Reward
from groupwise.rewards.scoring import PASSED, made_up
from groupwise.rewards.workers import ask


@runtime_checkable
class Equating(Protocol):
    r"""A reward to which two answers may be equal though they are spelled differently.

    It is asked: a completion with `\boxed{one}` has to pass where `column` of the row holds the other.
    """

    column: str

    def doubtful(self, one: str, other: str) -> bool:
        """Whether it has to be asked about these two, which differ as text."""
        ...


def votes(reward: Reward, rollouts: Sequence[Rollout]) -> NDArray[np.int64] | None:
    """int64[n]: which answer each rollout votes for, from 0 in each group; -1 where it has none.

    A reward has an answer to vote on when it has a method `answer(text)`, the text of a completion to its final answer
    or None.  A rollout without a verdict of the reward does not vote.

    Returns:
        None where the reward has no such method: it judges completions, not answers.

    Raises:
        RewardError: see `score`.
    """
    answer = getattr(reward.use, "answer", None)
    if answer is None:
        return None
    groups: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(place)
    # A text that the reward had a verdict on is one that can be read in a time that it allows.
    judged = [math.isfinite(rollout.rewards.get(reward.title, math.nan)) for rollout in rollouts]
    said = [str(answer(rollout.text) or "") if known else "" for rollout, known in zip(rollouts, judged, strict=True)]
    spellings = {
        group: list(dict.fromkeys(said[place] for place in places if said[place])) for group, places in groups.items()
    }
    rows = {group: rollouts[places[0]].example for group, places in groups.items()}
    same = _same(reward, spellings, rows)
    found = np.full(len(rollouts), -1)
    for group, places in groups.items():
        first: dict[str, int] = {}  # of each spelling, the number of the first one that is the same answer
        for number, spelled in enumerate(spellings[group]):
            equal = (first[other] for other in spellings[group][:number] if (group, other, spelled) in same)
            first[spelled] = next(equal, number)
        for place in places:
            found[place] = first.get(said[place], -1)
    return found


def _same(
    reward: Reward, spellings: Mapping[int, Sequence[str]], rows: Mapping[int, Mapping[str, object]]
) -> set[tuple[int, str, str]]:
    """The (group, answer, later answer) that differ as text and that the reward takes for the same."""
    use = reward.use
    if not isinstance(use, Equating):
        return set()
    pairs = [
        (group, one, other)
        for group, answers in spellings.items()
        for one, other in combinations(answers, 2)
        if use.doubtful(one, other)
    ]
    asked = [made_up(f"\\boxed{{{other}}}", {**rows[group], use.column: one}) for group, one, other in pairs]
    (verdicts,) = ask([Question(reward, asked, [""] * len(asked))])
    return {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.value > PASSED}
