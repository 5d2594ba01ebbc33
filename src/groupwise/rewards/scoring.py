"""From rollouts to scored rollouts, and the trial that finds a reward's mistakes before anything is sampled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from groupwise.chat import Prompt
from groupwise.errors import RewardError, did_you_mean
from groupwise.records import Rollout
from groupwise.rewards.calls import Together, Verdict, check_columns
from groupwise.rewards.questions import Question
from groupwise.rewards.reward import Reward
from groupwise.rewards.workers import ask, load

PromptOf = Callable[[Mapping[str, Any]], Prompt]
"""From a dataset row to the prompt that was made of it."""
TokenAt = Callable[[Rollout, int], int]
"""From a number of characters of a rollout's text to the index of the token that says the last of them."""


PASSED = 0.5
"""A reward opens the gate for those `after` it, and makes a completion count as right, when it is greater than this."""
CHOICE = "reward"
"""The column by which a row chooses its rewards."""


def score(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward], prompt_of: PromptOf, token_at: TokenAt | None = None
) -> list[Rollout]:
    """The rollouts with `rewards`, `reward_weights` and `reward` (the weighted sum, in float64), and `step_rewards`.

    A reward that raises, takes too long, takes its worker down or returns what is no finite number makes its rollout
    not valid: `problem` says why, `faults` which kind it was, and both its value and `reward` are nan, never 0.  None
    in TRL's list is no opinion, and so is a row that chooses other rewards: it is nan in `rewards` and left out of the
    sum; a rollout on which every reward has none is not valid.

    Where a reward judges steps, so do all: `step_rewards` has, by token, the weighted sum of what they say of the step
    that ends there, and a reward of the whole completion counts at its last token.  Only this needs `token_at`.

    Raises:
        RewardError: a reward cannot be loaded in a worker, or stopped the run on purpose.
    """
    prompts = [prompt_of(rollout.example) for rollout in rollouts]
    said: dict[str, list[Verdict]] = {}
    waiting = list(rewards)
    while waiting:
        ready = [reward for reward in waiting if not reward.after or reward.after in said]
        unasked = [[_unasked(reward, rollout, i, said) for i, rollout in enumerate(rollouts)] for reward in ready]
        answers = ask([_question(*asked, rollouts, prompts) for asked in zip(ready, unasked, strict=True)])
        for reward, known, answer in zip(ready, unasked, answers, strict=True):
            given = iter(answer)
            said[reward.title] = [next(given) if verdict is None else verdict for verdict in known]
        waiting = [reward for reward in waiting if reward.title not in said]
    weights = {reward.title: reward.weight for reward in rewards}
    return [
        _summed(rollout, {reward.title: said[reward.title][index] for reward in rewards}, weights, token_at)
        for index, rollout in enumerate(rollouts)
    ]


def _unasked(reward: Reward, rollout: Rollout, index: int, said: Mapping[str, Sequence[Verdict]]) -> Verdict | None:
    """The verdict that is known without a call; None when there is something to ask."""
    if not grades(reward, rollout.example):
        return Verdict(math.nan)
    if not reward.after:
        return None
    gate = said[reward.after][index]
    if gate.problem:
        return Verdict(math.nan)  # the rollout is not valid, whatever this one would say
    return Verdict(0.0) if gate.value <= PASSED else None  # without an opinion (nan) there is no gate


def _question(
    reward: Reward, known: Sequence[Verdict | None], rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
) -> Question:
    places = [place for place, verdict in enumerate(known) if verdict is None]
    return Question(reward, [rollouts[place] for place in places], [prompts[place] for place in places])


def grades(reward: Reward, row: Mapping[str, Any]) -> bool:
    """Whether a reward has an opinion on a row: all have, unless the row names some in its column `reward`."""
    named = chosen(row)
    return not named or reward.title in named


def chosen(row: Mapping[str, Any]) -> Sequence[str]:
    """The rewards that a row names, as text or as a list of text; none when it leaves the choice open."""
    named = row.get(CHOICE)
    if isinstance(named, str):
        return (named,)
    names = cast(Sequence[object], named) if isinstance(named, list | tuple) else ()
    return [name for name in names if isinstance(name, str)]


def _summed(
    rollout: Rollout, said: Mapping[str, Verdict], weights: Mapping[str, float], token_at: TokenAt | None
) -> Rollout:
    problems = [f"rewards.{title}: {verdict.problem}" for title, verdict in said.items() if verdict.problem]
    values = {title: verdict.value for title, verdict in said.items()}
    given = {title: value for title, value in values.items() if not math.isnan(value)}
    if not given and not problems:
        problems = ["rewards: none has an opinion on this sample (all returned None)"]
    return dataclasses.replace(
        rollout,
        rewards=values,
        reward_weights=weights,
        reward=math.nan if problems else math.fsum(weights[title] * value for title, value in given.items()),
        valid=not problems,
        problem="; ".join(problems),
        faults={title: verdict.cause for title, verdict in said.items() if verdict.cause},
        step_rewards=() if problems else _by_token(rollout, said, weights, token_at),
    )


def _by_token(
    rollout: Rollout, said: Mapping[str, Verdict], weights: Mapping[str, float], token_at: TokenAt | None
) -> tuple[tuple[int, float], ...]:
    if not any(verdict.steps for verdict in said.values()):
        return ()
    assert token_at is not None, "whoever scores steps knows the tokens"
    sums: dict[int, float] = {}
    for title, verdict in said.items():
        whole = [] if math.isnan(verdict.value) else [(len(rollout.text), verdict.value)]
        for end, value in verdict.steps or whole:
            token = token_at(rollout, end)
            sums[token] = sums.get(token, 0.0) + weights[title] * value
    return tuple(sorted(sums.items()))


def check_rewards(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], prompt_of: PromptOf) -> None:
    r"""Find what can be known to be wrong with the rewards before the first token is sampled.

    Each reward's columns are looked up in the rows that it grades, each is loaded where it will run, and each is called
    once, unless its `trial` is off, on the first of its rows with a made-up completion: its `reference_answer`, or
    else the empty text.

    Raises:
        GroupwiseError: what a reward needs cannot be loaded.
        RewardError: a row names a reward that there is not, a column is missing, a function cannot be loaded in a
            worker, or the trial brought anything but a finite number (or None).
    """
    _check_choices(rewards, rows)
    graded = [{place: row for place, row in enumerate(rows) if grades(reward, row)} for reward in rewards]
    for reward, own in zip(rewards, graded, strict=True):
        if own:
            check_columns(reward.title, reward.use, own)
        if isinstance(reward.use, Together):
            reward.use.prepare({place: prompt_of(row) for place, row in own.items()})
    load(rewards)
    for reward, own in zip(rewards, graded, strict=True):
        if own and reward.trial:
            _try(reward, *next(iter(own.items())), prompt_of)


def _check_choices(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]]) -> None:
    titles = [reward.title for reward in rewards]
    for place, row in enumerate(rows):
        for name in chosen(row):
            if name not in titles:
                raise RewardError(
                    f"rewards: rows[{place}].{CHOICE} names {name!r}, and there is no such reward"
                    f"{did_you_mean(name, titles)}; accepted: {', '.join(titles)}. That column chooses which rewards "
                    "grade a row; give the reward this `name`, or rename the column if it means something else"
                )


def reference_answer(reward: Reward, row: Mapping[str, Any]) -> str | None:
    r"""A completion that is right, as far as can be told from a row; None when it cannot.

    A reward says it by its own `reference(row)`; else it is `\boxed{...}` of the column that it reads, or of `answer`.
    """
    known = getattr(reward.use, "reference", None)
    if known is not None:
        return known(row)
    columns: tuple[str, ...] = getattr(reward.use, "columns", ()) or ("answer",)
    return f"\\boxed{{{row[columns[0]]}}}" if row.get(columns[0]) is not None else None


def made_up(text: str, row: Mapping[str, Any], group: int = 0) -> Rollout:
    """A rollout as if a policy had said this text."""
    return Rollout(
        tokens=np.zeros(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, dtype=np.float32),
        group=group,
        text=text,
        example=row,
    )


def _try(reward: Reward, place: int, row: Mapping[str, Any], prompt_of: PromptOf) -> None:
    text = reference_answer(reward, row) or ""
    ((verdict,),) = ask([Question(reward, [made_up(text, row)], [prompt_of(row)])])
    if verdict.problem:
        raise RewardError(
            f"rewards.{reward.title}: {verdict.problem} when tried on rows[{place}] with the completion {text!r}, "
            "before any sampling; accepted: a finite number for any text. Mend the function or, if the trial is unfair "
            f"to it, set `trial: false` on rewards.{reward.title}"
        )
