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
from groupwise.rewards.calls import Verdict, check_columns, verdicts
from groupwise.rewards.reward import Reward

PromptOf = Callable[[Mapping[str, Any]], Prompt]
"""From a dataset row to the prompt that was made of it."""


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward], prompt_of: PromptOf) -> list[Rollout]:
    """The rollouts with `rewards`, `reward_weights` and `reward` (the weighted sum, in float64).

    A reward that raises, or returns nan or inf, makes its rollout not valid: `problem` says why, and both its value
    and `reward` are nan, never 0.  None in TRL's list is no opinion: it is nan in `rewards` and left out of the sum;
    a rollout on which every reward has none is not valid.

    Raises:
        RewardError: a reward broke its contract (a wrong length, a dict, a string, ...).
    """
    prompts = [prompt_of(rollout.example) for rollout in rollouts]
    said = {reward.title: verdicts(reward.title, reward.use, rollouts, prompts) for reward in rewards}
    weights = {reward.title: reward.weight for reward in rewards}
    return [
        _summed(rollout, {title: given[index] for title, given in said.items()}, weights)
        for index, rollout in enumerate(rollouts)
    ]


def _summed(rollout: Rollout, said: Mapping[str, Verdict], weights: Mapping[str, float]) -> Rollout:
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
    )


def check_rewards(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], prompt_of: PromptOf) -> None:
    r"""Find what can be known to be wrong with the rewards before the first token is sampled.

    Each reward's columns are looked up in `rows`, and each is called once, unless its `trial` is off, on `rows[0]` with
    a made-up completion: its `reference_answer`, or else the empty text.

    Raises:
        RewardError: a column is missing, or the trial raised, or returned anything but a finite number (or None).
    """
    for reward in rewards:
        check_columns(reward.title, reward.use, rows)
        if reward.trial:
            _try(reward, rows[0], prompt_of)


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


def _try(reward: Reward, row: Mapping[str, Any], prompt_of: PromptOf) -> None:
    text = reference_answer(reward, row) or ""
    (verdict,) = verdicts(reward.title, reward.use, [made_up(text, row)], [prompt_of(row)])
    if verdict.problem:
        raise RewardError(
            f"rewards.{reward.title}: {verdict.problem} when tried on rows[0] with the completion {text!r}, before any "
            "sampling; accepted: a finite number for any text. Mend the function or, if the trial is unfair to it, set "
            f"`trial: false` on rewards.{reward.title}"
        )
