"""From rollouts to scored rollouts, and the trial that finds a reward's mistakes before anything is sampled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.chat import Prompt
from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards.calls import Together, Verdict, check_columns, verdicts
from groupwise.rewards.reward import Reward

PromptOf = Callable[[Mapping[str, Any]], Prompt]
"""From a dataset row to the prompt that was made of it."""
TokenAt = Callable[[Rollout, int], int]
"""From a number of characters of a rollout's text to the index of the token that says the last of them."""


def score(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward], prompt_of: PromptOf, token_at: TokenAt | None = None
) -> list[Rollout]:
    """The rollouts with `rewards`, `reward_weights` and `reward` (the weighted sum, in float64), and `step_rewards`.

    A reward that raises, or returns nan or inf, makes its rollout not valid: `problem` says why, and both its value
    and `reward` are nan, never 0.  None in TRL's list is no opinion: it is nan in `rewards` and left out of the sum;
    a rollout on which every reward has none is not valid.

    Where a reward judges steps, so do all: `step_rewards` has, by token, the weighted sum of what they say of the step
    that ends there, and a reward of the whole completion counts at its last token.  Only this needs `token_at`.

    Raises:
        RewardError: a reward broke its contract (a wrong length, a dict, a string, ...).
    """
    prompts = [prompt_of(rollout.example) for rollout in rollouts]
    said = {reward.title: verdicts(reward.title, reward.use, rollouts, prompts) for reward in rewards}
    weights = {reward.title: reward.weight for reward in rewards}
    return [
        _summed(rollout, {title: given[index] for title, given in said.items()}, weights, token_at)
        for index, rollout in enumerate(rollouts)
    ]


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

    Each reward's columns are looked up in `rows`, and each is called once, unless its `trial` is off, on `rows[0]` with
    a made-up completion: `\boxed{reference}` when the row has the column it reads (or `answer`), else the empty text.

    Raises:
        GroupwiseError: what a reward needs cannot be loaded.
        RewardError: a column is missing, or the trial raised, or returned anything but a finite number (or None).
    """
    for reward in rewards:
        check_columns(reward.title, reward.use, rows)
        if isinstance(reward.use, Together):
            reward.use.prepare({place: prompt_of(row) for place, row in enumerate(rows)})
        if reward.trial:
            _try(reward, rows[0], prompt_of)


def _try(reward: Reward, row: Mapping[str, Any], prompt_of: PromptOf) -> None:
    columns: tuple[str, ...] = getattr(reward.use, "columns", ()) or ("answer",)
    text = f"\\boxed{{{row[columns[0]]}}}" if columns[0] in row else ""
    made_up = Rollout(
        tokens=np.zeros(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, dtype=np.float32),
        group=0,
        text=text,
        example=row,
    )
    (verdict,) = verdicts(reward.title, reward.use, [made_up], [prompt_of(row)])
    if verdict.problem:
        raise RewardError(
            f"rewards.{reward.title}: {verdict.problem} when tried on rows[0] with the completion {text!r}, before any "
            "sampling; accepted: a finite number for any text. Mend the function or, if the trial is unfair to it, set "
            f"`trial: false` on rewards.{reward.title}"
        )
