"""What a step learns from: whole groups, sampled and scored, with DAPO's dynamic sampling on top."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial

from groupwise.ahead import in_advance
from groupwise.build import Parts
from groupwise.config import Config
from groupwise.groups import by_group, informative
from groupwise.records import Rollout
from groupwise.rollout import play
from groupwise.seeding import generator
from groupwise.slots import replace
from groupwise.surplus import Surplus


def experience(
    config: Config, parts: Parts, start: int = 0, note: Callable[[dict[str, float]], None] = lambda metrics: None
) -> Generator[tuple[int, list[Rollout]]]:
    """(step, its scored groups), from a policy at most `config.ahead` steps older than when the step is asked for."""

    def played(step: int) -> list[Rollout]:
        usual = parts.task.rows_for_step(step, config.prompts_per_step, config.seed)
        rollouts = _play(config, parts, usual, step, 0)
        if config.algorithm.filter == "dynamic_sampling":
            rollouts = _fill_with_informative_groups(config, parts, step, rollouts)
        return rollouts

    def waiting(steps: int) -> None:
        note({"queue": float(steps)})

    yield from in_advance(played, start, config.steps, config.ahead, waiting)


def _play(config: Config, parts: Parts, rows: Sequence[int], step: int, draw: int) -> list[Rollout]:
    """The scored groups of some rows, kept on disk until a checkpoint covers them where the run has a folder."""
    sample = partial(_sample, config, parts, rows, step, draw)
    return sample() if parts.pending is None else parts.pending.recall(step, draw, sample)


def _sample(config: Config, parts: Parts, rows: Sequence[int], step: int, draw: int) -> list[Rollout]:
    """The scored groups of some rows; with a greedy baseline, every rollout knows what the greedy answer earned."""
    if parts.history is not None:  # with a curriculum, other rows take the place of those that it skips
        rows = parts.history.instead_of(rows, step, draw, config.seed)
    play_rows = partial(play, parts.task, parts.sampler, parts.chat, rows, seed=config.seed, step=step)
    rollouts = play_rows(group_size=config.group_size, sampling=config.sampling, stream=f"train.{draw}")
    if not config.algorithm.greedy_baseline:
        return rollouts
    greedy = play_rows(group_size=1, sampling=replace(config.sampling, temperature=0.0), stream=f"greedy.{draw}")
    earned = {rollout.group: rollout for rollout in greedy}
    return [_against_greedy(rollout, earned[rollout.group]) for rollout in rollouts]


def _against_greedy(rollout: Rollout, greedy: Rollout) -> Rollout:
    if greedy.valid:
        return dataclasses.replace(rollout, greedy_reward=greedy.reward)
    problem = rollout.problem or f"the greedy completion of its prompt has no reward: {greedy.problem}"
    return dataclasses.replace(rollout, valid=False, problem=problem)


class _Gathered:
    """The groups of a step as they come, numbered on from each other; whether one can teach is looked at once."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.groups: list[list[Rollout]] = []
        self.informative: list[list[Rollout]] = []
        self.add(rollouts)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for members in by_group(rollouts).values():
            group = [dataclasses.replace(rollout, group=len(self.groups)) for rollout in members]
            self.groups.append(group)
            if informative(group):
                self.informative.append(group)


def _fill_with_informative_groups(config: Config, parts: Parts, step: int, rollouts: list[Rollout]) -> list[Rollout]:
    """DAPO's dynamic sampling (arXiv:2503.14476): draw more prompts until `prompts_per_step` groups can teach.

    What the step before left over comes first; then as many prompts are drawn as it takes at the share of groups that
    could teach so far, `sampling_rounds` times at most.  Groups that cannot teach are kept for the metrics;
    `Algorithm.batches` leaves them out.  Informative groups beyond the number wanted are left to the next step.
    """
    wanted, surplus, gathered = config.prompts_per_step, parts.surplus or Surplus(), _Gathered(rollouts)
    taken = surplus.groups[: wanted - len(gathered.informative)]
    for group in taken:
        gathered.add(group)
    drawn = wanted
    for draw in range(1, config.sampling_rounds):
        missing = wanted - len(gathered.informative)
        if missing <= 0:
            break
        more = math.ceil(missing * drawn / max(len(gathered.informative) - len(taken), 1))
        order = generator(config.seed, "more prompts", step, draw).permutation(len(parts.task.rows))
        rows = order[: min(more, wanted)].tolist()
        gathered.add(_play(config, parts, rows, step, draw))
        drawn += len(rows)
    beyond = gathered.informative[wanted:]
    surplus.leave(beyond)
    left = {group[0].group for group in beyond}
    return [rollout for number, group in enumerate(gathered.groups) if number not in left for rollout in group]
