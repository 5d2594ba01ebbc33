"""The completions of a run for the page: a digest of every step, and whole groups with their tokens where they fit.

A digest has one entry a completion and no tokens.  Whole groups are JSON-able: `pieces` is a vocabulary of token
texts, a completion's `tokens` are indices into it, and its log-probs are in thousandths of a nat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from groupwise.errors import CheckpointError

Floats = NDArray[np.float64]
Json = dict[str, Any]

GROUPS_A_STEP = 4
"""A step of a long run shows at least so many of its groups, or all."""
MOST_TOKENS = 2000
"""What is shown of a longer completion: its beginning and its end."""
SCALARS = ["group", "prompt", "text", "length", "reward", "valid", "finish_reason"]
TOKENS = ["advantage", "problem", "policy_version", "pieces", "loss_mask", "logprobs"]
OPTIONAL = ["advantages", "entropies", "ref_logprobs", "old_logprobs", "new_logprobs"]
# The marks of chat templates (some with full-width bars), with the role that some put after them.
_BAR = "[|\\uff5c]"
_MARK = re.compile(
    rf"(?:<{_BAR}[^<>|\\uff5c]*{_BAR}>|<(?:start|end)_of_turn>|\[/?INST\])(?:(?:system|user|assistant|model)\n)?"
)


@dataclass(frozen=True)
class Digest:
    """The completions of a step or of an evaluation; every array has an entry for each, in the order of the file."""

    step: int
    groups: NDArray[np.int64]
    prompts: Sequence[str]
    texts: Sequence[str]
    lengths: Floats
    rewards: Floats
    """The weighted sum; nan where there is no trustworthy reward."""
    headline: Floats
    """The reward function that the run is judged by; nan where it had no opinion."""
    truncated: NDArray[np.bool_]

    def means(self) -> dict[int, float]:
        """The mean headline reward of each group; a completion without one counts 0."""
        scores = np.nan_to_num(self.headline)
        return {int(group): float(scores[self.groups == group].mean()) for group in np.unique(self.groups)}


def step_of(file: Path) -> int:
    """The step whose completions a file holds."""
    return int(file.stem.removeprefix("step-"))


def rewards_of(file: Path) -> list[str]:
    """The names of the reward functions, the headline first."""
    return [name.removeprefix("reward/") for name in pq.read_schema(file).names if name.startswith("reward/")]


def digest(file: Path, headline: str) -> Digest:
    """What a file of completions says without its tokens.

    Raises:
        CheckpointError: a column is missing.
    """
    table = _read(file, [*SCALARS, f"reward/{headline}"])
    column = {name: table.column(name).to_numpy() for name in table.column_names if name not in ("prompt", "text")}
    return Digest(
        step=step_of(file),
        groups=column["group"].astype(np.int64),
        prompts=table.column("prompt").to_pylist(),
        texts=table.column("text").to_pylist(),
        lengths=column["length"].astype(np.float64),
        rewards=np.where(column["valid"], column["reward"].astype(np.float64), np.nan),
        headline=column[f"reward/{headline}"].astype(np.float64),
        truncated=column["finish_reason"] == "length",
    )


def _read(file: Path, columns: Sequence[str]) -> Any:
    missing = [name for name in columns if name not in pq.read_schema(file).names]
    if missing:
        raise CheckpointError(
            f"{file}: has no column {missing[0]}, so it was written by another version of groupwise; make the report "
            "with that version, or run again"
        )
    return pq.read_table(file, columns=list(columns))


def choose(digests: Sequence[Digest], budget: int) -> dict[int, list[int]]:
    """The groups to show in full, by step: all of them, or about as many as have `budget` tokens.

    Steps are spread evenly over the run, the first and the last among them, and the groups of a step over their mean
    rewards, from the hardest prompt to the easiest; the one whose rewards differ most is always there.
    """
    if not digests:
        return {}
    # A prompt costs a few tokens, too, so that a run of empty completions has an end.
    shown = sum(float(np.minimum(digest.lengths, MOST_TOKENS).sum()) + len(digest.lengths) for digest in digests)
    per_step = max(len(set(digest.groups.tolist())) for digest in digests)
    affordable = max(1, int(budget / shown * per_step * len(digests)))
    each = min(per_step, max(GROUPS_A_STEP, affordable // len(digests)))
    steps = _spread(range(len(digests)), max(1, affordable // each))
    return {digests[step].step: _spread_groups(digests[step], each) for step in steps}


def _spread_groups(one: Digest, count: int) -> list[int]:
    means, rewards = one.means(), np.nan_to_num(one.rewards)
    widest = max(means, key=lambda group: float(np.ptp(rewards[one.groups == group])))
    others = sorted(means.keys() - {widest}, key=means.__getitem__)
    return sorted([widest, *_spread(others, count - 1)])


def _spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items at even distances, the first and the last among them."""
    if count >= len(items):
        return list(items)
    places = np.linspace(0, len(items) - 1, count) if count > 1 else np.full(count, len(items) - 1)
    return [items[int(place)] for place in places.round()]


class Vocabulary:
    """Token texts, each of them once."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __call__(self, piece: str) -> int:
        return self._index.setdefault(piece, len(self._index))

    @property
    def pieces(self) -> list[str]:
        """All of them, by index."""
        return list(self._index)


def whole_groups(files: Mapping[int, Path], chosen: Mapping[int, Sequence[int] | None]) -> Json:
    """`{"pieces": [...], "steps": {step: [group, ...]}}` of the chosen groups (None: all) of some steps.

    Raises:
        CheckpointError: a column is missing.
    """
    vocabulary = Vocabulary()
    steps = {str(step): list(_groups(files[step], groups, vocabulary)) for step, groups in chosen.items()}
    return {"pieces": vocabulary.pieces, "steps": steps}


def _groups(file: Path, wanted: Sequence[int] | None, vocabulary: Vocabulary) -> Iterator[Json]:
    names, there = rewards_of(file), pq.read_schema(file).names
    optional = [name for name in OPTIONAL if name in there]
    table = _read(file, [*SCALARS, *TOKENS, *(f"reward/{name}" for name in names), *optional])
    if wanted is not None:
        table = table.filter(np.isin(table.column("group").to_numpy(), wanted))
    groups: dict[int, list[Json]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    for group, rows in groups.items():
        completions = [_completion(row, names, vocabulary) for row in rows]
        yield {"group": group, "prompt": rows[0]["prompt"], "completions": completions}


def _completion(row: Json, names: Sequence[str], vocabulary: Vocabulary) -> Json:
    places = np.flatnonzero(row["loss_mask"])
    first = int(places[0]) if len(places) else len(row["loss_mask"])
    said = np.arange(first, len(row["loss_mask"]))  # an environment's words between the policy's are shown, too
    left_out = max(len(said) - MOST_TOKENS, 0)
    if left_out:
        said = np.concatenate([said[: MOST_TOKENS // 2], said[-(MOST_TOKENS // 2) :]])
    pieces, sampled = [row["pieces"][i] for i in said], np.array(row["loss_mask"])[said]
    shown: Json = {
        "reward": _number(row["reward"]),
        "rewards": [_number(row[f"reward/{name}"]) for name in names],
        "advantage": _number(row["advantage"]),
        "valid": row["valid"],
        "problem": row["problem"],
        "finish": row["finish_reason"],
        "version": row["policy_version"],
        "length": row["length"],
        "left_out": left_out,
        "tokens": [vocabulary(piece) for piece in pieces],
        "logprobs": _milli(row["logprobs"], said),
    }
    if not sampled.all():
        shown["sampled"] = sampled.astype(int).tolist()
    if row.get("advantages") is not None:
        advantages = np.array(row["advantages"])[said]
        if len(set(advantages[sampled].tolist())) > 1:  # otherwise `advantage` says it
            shown["advantages"] = [_number(value) for value in advantages]
    if row.get("entropies") is not None:
        shown["entropies"] = _milli(row["entropies"], said)
    if row.get("new_logprobs") is not None:
        old = row["logprobs"] if row.get("old_logprobs") is None else row["old_logprobs"]
        shown["change"] = _milli(np.subtract(row["new_logprobs"], old), said)
    if row.get("ref_logprobs") is not None:
        shown["drift"] = _milli(np.subtract(row["logprobs"], row["ref_logprobs"]), said)
    return shown


def _milli(values: Any, places: NDArray[np.int64]) -> list[int]:
    thousandths = np.asarray(values, dtype=np.float64)[places] * 1000
    return np.nan_to_num(thousandths, neginf=-99999, posinf=99999).round().astype(int).tolist()


def _number(value: float | None) -> float | None:
    """Short, and only what JSON can spell."""
    return None if value is None or not math.isfinite(value) else round(float(value), 4)


def question(prompt: str) -> str:
    """What a prompt asks: its last part between the marks of a chat template."""
    parts = [part.strip() for part in _MARK.split(prompt)]
    said = [part for part in parts if part and part not in ("<think>", "system", "user", "assistant", "model")]
    return said[-1] if said else prompt.strip()
