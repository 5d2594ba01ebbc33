"""`groupwise compare`: what other algorithms would do with the rollouts that a run has stored.

stored     a step's rollouts as they were, and the weights that the run kept
opinions   what an algorithm says about rollouts, without a model
policy     what needs the weights: log-probs, gradients
tables     the result as tables, for the terminal and the report
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groupwise.advantages import Array
from groupwise.algorithms import Algorithm
from groupwise.checkpoint import check_run
from groupwise.compare import policy
from groupwise.compare.opinions import Json, Opinion, cosines, favours, held_back, norms, of_valid, opinion, tokens_of
from groupwise.compare.stored import Stored, Weights, nearest, read_step
from groupwise.compare.tables import result_file
from groupwise.config import Config
from groupwise.engines.local_learner import LocalLearner
from groupwise.errors import GroupwiseError
from groupwise.files import write_whole, writing
from groupwise.records import Floats, Rollout

RUN = "run"
"""The name that the run's own algorithm has among those compared."""
SAME = 1e-3
"""How far recomputed advantages may be from those stored, relative to the largest."""
Algorithms = Mapping[str, Algorithm]


def compare(run: Path, algorithms: Algorithms, step: int | None = None, *, gradients: bool | None = None) -> Json:
    """Each algorithm, and the run's own, on the rollouts of one step, all of them in one update.

    Args:
        run: a run folder, also of a run that goes on.
        algorithms: what to compare, by name.
        step: from 1; the last one when None.
        gradients: load the model, for gradients of the weights among others; None: where that is possible.

    Returns:
        What `docs/seeing.md` describes, of nothing but what JSON can spell.

    Raises:
        CheckpointError: the folder is no run, or holds no rollouts.
        ConfigError: there are no rollouts of that step.
        GroupwiseError: `gradients` is True and the model cannot be loaded.
    """
    check_run(run)
    config = Config.load(run / "config.yaml").resolve()
    stored = read_step(run, config, step)
    named = {name: one.resolve(config.sampling.max_tokens) for name, one in algorithms.items()}
    asked = {name: one.adapt(stored.rollouts) for name, one in {RUN: config.algorithm, **named}.items()}
    notes: list[str] = []
    optional = partial(_if_possible, required=gradients is True, notes=notes)
    weights, rollouts = nearest(stored.kept, stored.step - 1), _filled(stored.rollouts)
    learner, in_weights, moved = None, None, _read_again(stored)
    if gradients is not False:
        with optional("model to compare with"):
            learner = policy.load(config, weights)
            rollouts = _annotated(stored, learner, weights, asked.values())
    found, left_out = _opinions(asked, rollouts, config)
    if learner is not None:
        with optional("gradients of the weights"):
            in_weights = policy.gradients(learner, stored.rollouts, [one.push_of_each() for one in found.values()])
        with optional("clip fractions at weights that were kept"):
            moved = _moved(config, stored, learner, weights) or moved
    tokens = tokens_of(stored.rollouts, config.rewards[0].title)
    own = _advantages(stored.rollouts)
    pushes = np.array([one.push for one in found.values()]).reshape(len(found), len(tokens.owner))
    products = pushes @ pushes.T
    return {
        "step": stored.step,
        "completions": len(stored.rollouts),
        "prompts": len({rollout.group for rollout in stored.rollouts}),
        "headline": config.rewards[0].title,
        "weights": None if in_weights is None else weights.as_json(),
        "moved": moved.source,
        "token_shares": tokens.shares(np.ones(len(tokens.owner))),
        "algorithms": [
            {"name": name, **favours(one, tokens, own), **held_back(asked[name], one.credited, moved.logprobs)}
            for name, one in found.items()
        ],
        "norm": {"logprobs": norms(products), "weights": None if in_weights is None else norms(in_weights)},
        "cosine": {"logprobs": cosines(products), "weights": None if in_weights is None else cosines(in_weights)},
        "left_out": left_out,
        "notes": [*notes, *_doubts(asked, found, own)],
    }


def save(run: Path, result: Json) -> Path:
    """Keep a result in the run folder, where the report finds it.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = result_file(run, result["step"])
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1, allow_nan=False).encode())
    return path


@contextlib.contextmanager
def _if_possible(what: str, required: bool, notes: list[str]) -> Generator[None]:
    """What cannot be computed is required, or said in a note."""
    try:
        yield
    except GroupwiseError as error:
        if required:
            raise
        notes.append(f"no {what}: {error}")


# What the algorithms see ---------------------------------------------------------------------------------------------


def _filled(rollouts: Sequence[Rollout], **fields: Sequence[Floats]) -> list[Rollout]:
    """The rollouts with these fields where they were not stored; the old policy is else the one that sampled."""
    for name, values in {**fields, "old_logprobs": fields.get("old_logprobs", [r.logprobs for r in rollouts])}.items():
        rollouts = [
            dataclasses.replace(rollout, **{name: value}) if getattr(rollout, name) is None else rollout
            for rollout, value in zip(rollouts, values, strict=True)
        ]
    return list(rollouts)


def _annotated(
    stored: Stored, learner: LocalLearner, weights: Weights, algorithms: Iterable[Algorithm]
) -> list[Rollout]:
    """As `train.annotate`, of what was not stored; the old policy's log-probs only where these are its weights."""
    fields: dict[str, Sequence[Floats]] = {}
    if weights.steps_done == stored.step - 1:
        fields["old_logprobs"] = policy.logprobs_of(learner, stored.rollouts)
    if any("ref_logprobs" in algorithm.needs(1) for algorithm in algorithms):
        fields["ref_logprobs"] = policy.logprobs_of(learner, stored.rollouts, reference=True)
    return _filled(stored.rollouts, **fields)


class Moved(NamedTuple):
    """A policy beside the one that sampled."""

    logprobs: Sequence[Floats | None]
    """Of each rollout; None where they are not known."""
    source: Json | None
    """Where they are from; None when there are none."""


def _read_again(stored: Stored) -> Moved:
    """After the step's own updates, of the group that the run read again then, if it did."""
    found = [rollout.new_logprobs for rollout in stored.rollouts]
    known = sum(one is not None for one in found)
    return Moved(found, {"steps_done": stored.step, "name": None, "completions": known} if known else None)


def _moved(config: Config, stored: Stored, learner: LocalLearner, weights: Weights) -> Moved | None:
    """At the weights nearest to those after the step; None where only those that sampled it were kept."""
    others = [one for one in stored.kept if one.steps_done != stored.step - 1]
    if not others:
        return None
    target = nearest(others, stored.step)
    found = policy.logprobs_of(policy.moved(config, learner, weights, target), stored.rollouts)
    return Moved(found, {**target.as_json(), "completions": len(found)})


def _opinions(
    algorithms: Algorithms, rollouts: Sequence[Rollout], config: Config
) -> tuple[dict[str, Opinion], list[Json]]:
    """The opinion of each algorithm that can have one, and why the others have none."""
    found: dict[str, Opinion] = {}
    left_out: list[Json] = []
    for name, algorithm in algorithms.items():
        reasons = [reason for lacking, reason in _lacking(algorithm, rollouts, config) if lacking]
        if not reasons:
            found[name] = opinion(algorithm, rollouts)
        else:
            left_out.append({"name": name, "reason": "; ".join(reasons)})
    return found, left_out


def _lacking(algorithm: Algorithm, rollouts: Sequence[Rollout], config: Config) -> Iterator[tuple[bool, str]]:
    """What an algorithm needs and the rollouts may not have: (whether that is so, what to say)."""
    needs = algorithm.needs(1)

    def unknown(name: str) -> bool:
        return any(getattr(rollout, name) is None for rollout in rollouts)

    yield (
        "ref_logprobs" in needs and unknown("ref_logprobs"),
        "it needs log-probs of the reference, which the run did not store and only a model can compute",
    )
    yield (
        "values" in needs and unknown("values"),
        "it needs the values of a critic, which only a run that trains one has",
    )
    yield (
        algorithm.greedy_baseline and not config.algorithm.greedy_baseline,
        "it needs the reward of each prompt's greedy completion, which only a run with greedy_baseline has",
    )
    yield (
        algorithm.supervision == "process" and not any(rollout.step_rewards for rollout in rollouts),
        "it needs rewards of steps, and no reward function of the run gave any",
    )
    yield (
        algorithm.selection is not None and unknown("entropies"),
        "it needs the entropies of the tokens, which the run did not store",
    )


def _advantages(rollouts: Sequence[Rollout]) -> Array | None:
    """[N]: those that the run had; None where it stored none."""
    known = [rollout.advantages[rollout.loss_mask] for rollout in rollouts if rollout.advantages is not None]
    return of_valid(rollouts, known) if len(known) == len(rollouts) else None


def _doubts(algorithms: Algorithms, found: Mapping[str, Opinion], own: Array | None) -> Iterator[str]:
    """What a reader should know before believing the numbers."""
    if own is not None and RUN in found:
        apart = float(np.abs(found[RUN].advantages - own).max(initial=0.0))
        if apart > SAME * max(float(np.abs(own).max(initial=0.0)), 1e-6):
            yield (
                f"the run's own advantages come out up to {apart:.2g} apart from those that it stored: a coefficient "
                "has moved with the run, or the log-probs that it used were not stored"
            )
    for name in found:
        if algorithms[name].entropy is not None:
            yield f"{name}: its entropy bonus acts on whole distributions and not on single tokens, and is not counted"
