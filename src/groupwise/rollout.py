"""Playing a task: the prompts of some rows go to a sampler as groups, and come back as scored rollouts.

Training and evaluation use the same function with different streams of randomness, which cannot collide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from groupwise.chat import Chat
from groupwise.engines import Completion, Request, Sampler, Sampling
from groupwise.records import Floats, Ints, Rollout
from groupwise.rewards import score
from groupwise.seeding import key
from groupwise.tasks import Row, Task


def play(
    task: Task,
    sampler: Sampler,
    chat: Chat,
    row_indices: Sequence[int],
    *,
    group_size: int,
    sampling: Sampling,
    seed: int,
    step: int,
    stream: str = "train",
) -> list[Rollout]:
    """Sample a group of `group_size` completions for each row, and score them.

    The rollouts of row_indices[g] are number g * group_size to (g + 1) * group_size - 1 and have group g.  The key of
    sample s is key(seed, stream, step, g, s): the same arguments and weights give the same rollouts.

    Raises:
        RewardError: a reward broke its contract; a sample that merely cannot be scored is a rollout that is not valid.
    """
    rows = [task.rows[index] for index in row_indices]
    requests = [
        Request(
            prompt=chat.prompt(task.prompt_of(row), task.longest_prompt),
            keys=tuple(key(seed, stream, step, group, sample) for sample in range(group_size)),
        )
        for group, row in enumerate(rows)
    ]
    groups = sampler.sample(requests, sampling)
    assert [len(group) for group in groups] == [group_size] * len(rows)
    rollouts = [
        _rollout(requests[group].prompt, completion, group, row, chat)
        for group, row in enumerate(rows)
        for completion in groups[group]
    ]
    return score(rollouts, task.rewards, task.prompt_of, chat.token_at)


def _rollout(prompt: Ints, completion: Completion, group: int, row: Row, chat: Chat) -> Rollout:
    def after_prompt(values: Floats) -> Floats:
        return np.concatenate([np.zeros(len(prompt), dtype=np.float32), values.astype(np.float32)])

    tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
    return Rollout(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        logprobs=after_prompt(completion.logprobs),
        entropies=None if completion.entropies is None else after_prompt(completion.entropies),
        group=group,
        finish_reason=completion.finish_reason,
        text=chat.text(completion.tokens),
        example=row,
        policy_version=completion.policy_version,
    )
