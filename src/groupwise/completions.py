"""Every completion of a step or an evaluation as a row of `*/step-*.parquet`, with what is known of each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.chat import Chat
from groupwise.files import write_whole, writing
from groupwise.records import Rollout

KINDS = ("rollouts", "evaluations")
"""The folders of a run that have such files."""


def make_folders(folder: Path) -> None:
    """Where the files of a run go.

    Raises:
        CheckpointError: they cannot be made.
    """
    with writing(folder):
        for kind in KINDS:
            (folder / kind).mkdir(parents=True, exist_ok=True)


def write(folder: Path, kind: str, step: int, rollouts: Sequence[Rollout], chat: Chat) -> None:
    """Write the file of a step, whole.

    Raises:
        CheckpointError: it cannot be written.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table(step, rollouts, chat), sink)
    write_whole(folder / kind / f"step-{step:05d}.parquet", sink.getvalue().to_pybytes())


def forget(folder: Path, kind: str, after: int) -> None:
    """Delete the files of the steps after this one."""
    for file in (folder / kind).glob("step-*.parquet"):
        if int(file.stem.removeprefix("step-")) > after:
            file.unlink()


def table(step: int, rollouts: Sequence[Rollout], chat: Chat) -> pa.Table:
    """One row a completion; every list has an entry for each token, those of the prompt included."""
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    optional = ("entropies", "old_logprobs", "ref_logprobs", "new_logprobs", "values", "advantages")
    known = [name for name in optional if any(getattr(r, name) is not None for r in rollouts)]
    return pa.table(
        {
            "step": [step] * len(rollouts),
            "group": [r.group for r in rollouts],
            "prompt": [chat.prompt_text(r) for r in rollouts],
            "text": [r.text for r in rollouts],
            "length": [r.num_completion_tokens for r in rollouts],
            "reward": [r.reward for r in rollouts],
            **{f"reward/{name}": [r.rewards.get(name) for r in rollouts] for name in names},
            **_steps(rollouts),
            **({"greedy_reward": greedy} if any(greedy := [r.greedy_reward for r in rollouts]) else {}),
            "advantage": [_first_advantage(r) for r in rollouts],
            "valid": [r.valid for r in rollouts],
            "problem": [r.problem for r in rollouts],
            **{f"fault/{name}": pa.array([r.faults.get(name) for r in rollouts], pa.string()) for name in names},
            "finish_reason": [str(r.finish_reason) for r in rollouts],
            "policy_version": [r.policy_version for r in rollouts],
            "tokens": [r.tokens for r in rollouts],
            "pieces": [chat.pieces(r.tokens) for r in rollouts],
            "loss_mask": [r.loss_mask for r in rollouts],
            "logprobs": [r.logprobs for r in rollouts],
            **{name: [getattr(r, name) for r in rollouts] for name in known},
        }
    )


def _steps(rollouts: Sequence[Rollout]) -> dict[str, list[list[dict[str, float]]]]:
    """The column with the rewards of steps, where there are any."""
    rewards = [[{"token": token, "reward": reward} for token, reward in r.step_rewards] for r in rollouts]
    return {"step_rewards": rewards} if any(rewards) else {}


def _first_advantage(rollout: Rollout) -> float | None:
    return None if rollout.advantages is None else float(rollout.advantages[rollout.loss_mask][:1].sum())
