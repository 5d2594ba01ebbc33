"""`groupwise check-reward`: what the rewards say of answers known to be right or wrong, before a policy learns it.

A policy finds every hole of its verifier.  The holes that are easy to look for are looked for here: right answers that
are refused, other rows' answers, empty and hostile ones that are accepted, calls that fail or take long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean, median, stdev
from typing import Any

from rich.table import Table

from groupwise.build import load_sampler
from groupwise.columns import maker
from groupwise.config import Config
from groupwise.data import load_task
from groupwise.errors import ConfigError
from groupwise.groups import by_group
from groupwise.probes import ENDLESS, OTHER, REFERENCE, Probe, probes
from groupwise.records import Rollout
from groupwise.rewards import PASSED, Reward, check_rewards, made_up, score, workers_end
from groupwise.rollout import play
from groupwise.seeding import generator
from groupwise.slots import replace
from groupwise.tasks import Row, Task, check_prompts


@dataclass(frozen=True)
class Judgement:
    """What one reward said of one probe."""

    probe: Probe
    value: float
    """nan when it said nothing."""
    problem: str
    seconds: float

    @property
    def accepted(self) -> bool:
        """As for pass@k."""
        return self.value > PASSED

    @property
    def counts(self) -> bool:
        """Whether there is a verdict: a reward may have no opinion on a sample."""
        return not math.isnan(self.value)


@dataclass(frozen=True)
class Samples:
    """How the rewards tell a model's own answers apart."""

    prompts: int
    group_size: int
    means: Mapping[str, float]
    """Of each reward, where it had an opinion."""
    reward_std: float
    """Mean over the prompts of the standard deviation of the reward within a group."""
    frac_reward_zero_std: float
    """Share of the prompts whose answers all have the same reward: they would teach nothing."""
    invalid: float
    truncated: float


@dataclass(frozen=True)
class Report:
    """All that was found."""

    judgements: Mapping[str, Sequence[Judgement]]
    """By the name of the reward."""
    verifiers: Sequence[str]
    """The rewards that are expected to tell right from wrong: the first, and those that read a reference."""
    agreement: Mapping[str, float]
    """By pair of rewards: the share of answers that both accept or both refuse."""
    samples: Samples | None

    def share_right(self, title: str, *, of_right: bool) -> float:
        """The share of right answers that a reward accepts, or of wrong ones that it refuses; nan: there are none."""
        said = [j for j in self.judgements[title] if j.counts and j.probe.right == of_right]
        return fmean(j.accepted == of_right for j in said) if said else math.nan

    def seconds(self, title: str) -> tuple[float, float]:
        """(median, worst) of one call."""
        taken = [judgement.seconds for judgement in self.judgements[title]]
        return median(taken), max(taken)

    def problems(self) -> list[str]:
        """What should be mended before a run, a sentence each."""
        found = [text for title in self.judgements for text in self._of_reward(title)]
        if self.samples is not None and self.samples.frac_reward_zero_std == 1:
            found.append(
                f"none of the {self.samples.prompts} sampled prompts would teach anything: within each, all "
                f"{self.samples.group_size} answers have the same reward"
            )
        return found

    def _of_reward(self, title: str) -> Iterator[str]:
        said = self.judgements[title]
        for kind in dict.fromkeys(judgement.probe.kind for judgement in said):
            mine = [judgement for judgement in said if judgement.probe.kind == kind]
            failed = [judgement for judgement in mine if judgement.problem]
            if failed and kind != ENDLESS:  # not to judge that one is as good as to refuse it
                yield f"{title} fails on {kind} ({len(failed)} of {len(mine)}): {failed[0].problem}"
            wrong = [j for j in mine if j.counts and j.accepted != j.probe.right]
            if title in self.verifiers and wrong:
                text = f" {_short(wrong[0].probe.text)}" if kind in (REFERENCE, OTHER) else ""
                share = f"{len(wrong)} of {len(mine)} rows, such as rows[{wrong[0].probe.row}]"
                rewrite = kind == REFERENCE and len(wrong) == len(mine)
                way_out = "; if a right answer is written otherwise, say how with --answer" if rewrite else ""
                yield f"{title} gives {wrong[0].value:g} to {kind}{text} ({share}){way_out}"

    def unchecked(self) -> list[str]:
        """The verifiers that were asked about no right answer, because none is known."""
        return [title for title in self.verifiers if math.isnan(self.share_right(title, of_right=True))]

    def as_json(self) -> dict[str, Any]:
        """What JSON can spell: nan is null."""
        rewards: dict[str, Any] = {}
        for title, said in self.judgements.items():
            kinds = dict.fromkeys(judgement.probe.kind for judgement in said)
            typical, worst = self.seconds(title)
            rewards[title] = {
                "verifier": title in self.verifiers,
                "accepts_right": _finite(self.share_right(title, of_right=True)),
                "refuses_wrong": _finite(self.share_right(title, of_right=False)),
                "seconds_median": typical,
                "seconds_worst": worst,
                "accepted": {kind: _finite(accepted(said, kind)) for kind in kinds},
                "failed": sum(bool(judgement.problem) for judgement in said),
            }
        samples = None if self.samples is None else {**vars(self.samples), "means": dict(self.samples.means)}
        return {
            "rewards": rewards,
            "agreement": dict(self.agreement),
            "samples": samples,
            "problems": self.problems(),
        }


def accepted(said: Sequence[Judgement], kind: str) -> float:
    """The share of the answers of a kind that a reward accepts; nan when it has no verdict on any."""
    mine = [judgement for judgement in said if judgement.probe.kind == kind and judgement.counts]
    return fmean(judgement.accepted for judgement in mine) if mine else math.nan


def check_reward(
    task: Task, rows: int, seed: int, answer: Callable[[Row, str], str] | None = None, sampled: Sequence[Rollout] = ()
) -> Report:
    """Ask the rewards of a task about made-up answers to some of its rows, drawn at random.

    Args:
        rows: how many.
        answer: `f(row, its name)`, how a right answer to a row is written; None leaves it to `reference_answer`.
        sampled: scored groups of a model's answers to prompts of the task.
    """
    chosen = sorted(generator(seed, "check-reward").permutation(len(task.rows))[:rows].tolist())
    judgements = {
        reward.title: [_judge(task, reward, probe) for probe in probes(task, reward, chosen, answer)]
        for reward in task.rewards
    }
    verifiers = [
        reward.title for place, reward in enumerate(task.rewards) if place == 0 or getattr(reward.use, "columns", ())
    ]
    return Report(judgements, verifiers, _agreement(task, judgements, sampled), _samples(sampled) if sampled else None)


@workers_end()
def check_run(config: Config, rows: int, prompts: int, answer: str | None) -> Report:
    """The report on the rewards and the data of a run; with `prompts`, the model answers so many in groups, too.

    Raises:
        GroupwiseError: what is wrong with the settings, the data, the rewards or the model.
    """
    task = load_task(config.data, config.rewards)
    check_prompts(task)
    check_rewards([replace(reward, trial=False) for reward in task.rewards], task.rows, task.prompt_of)
    sampled: list[Rollout] = []
    if prompts:
        if not config.model:
            raise ConfigError(
                "model: missing; --sample needs one to answer the prompts: set model in the run file, or --model"
            )
        sampler, chat = load_sampler(config.model, replace(config.engine, sampler=None))
        chosen = generator(config.seed, "check-reward", "samples").permutation(len(task.rows))[:prompts].tolist()
        play_rows = partial(play, task, sampler, chat, chosen, group_size=config.group_size, sampling=config.sampling)
        sampled = play_rows(seed=config.seed, step=0, stream="check-reward")
    return check_reward(task, rows, config.seed, None if answer is None else _written(answer), sampled)


def _written(answer: str) -> Callable[[Row, str], str]:
    make = maker(answer, "--answer")
    return lambda row, name: str(make(row, name))


def _judge(task: Task, reward: Reward, probe: Probe) -> Judgement:
    rollout = made_up(probe.text, task.rows[probe.row])
    began = time.perf_counter()
    (scored,) = score([rollout], [replace(reward, after="")], task.prompt_of)
    seconds = time.perf_counter() - began
    mine = f"rewards.{reward.title}: "  # no opinion is no problem of the reward
    problem = scored.problem.removeprefix(mine) if scored.problem.startswith(mine) else ""
    return Judgement(probe, scored.rewards[reward.title], problem, seconds)


def _agreement(
    task: Task, judgements: Mapping[str, Sequence[Judgement]], sampled: Sequence[Rollout]
) -> dict[str, float]:
    """Only answers that both rewards were asked about count: their reference answers may differ."""
    said: dict[str, dict[object, bool]] = {}
    for title, given in judgements.items():
        said[title] = {j.probe: j.accepted for j in given if j.counts}
        values = enumerate(rollout.rewards.get(title, math.nan) for rollout in sampled)
        said[title] |= {number: value > PASSED for number, value in values if not math.isnan(value)}
    found: dict[str, float] = {}
    for one, other in combinations([reward.title for reward in task.rewards], 2):
        both = said[one].keys() & said[other].keys()
        if both:
            found[f"{one} and {other}"] = fmean(said[one][asked] == said[other][asked] for asked in both)
    return found


def _samples(rollouts: Sequence[Rollout]) -> Samples:
    groups = {
        group: [rollout.reward for rollout in members if rollout.valid] for group, members in by_group(rollouts).items()
    }
    titles = dict.fromkeys(title for rollout in rollouts for title in rollout.rewards)
    values = {title: [r.rewards[title] for r in rollouts if not math.isnan(r.rewards[title])] for title in titles}
    return Samples(
        prompts=len(groups),
        group_size=len(rollouts) // len(groups),
        means={title: fmean(given) for title, given in values.items() if given},
        reward_std=fmean(stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in groups.values()),
        frac_reward_zero_std=fmean(not rewards or max(rewards) == min(rewards) for rewards in groups.values()),
        invalid=fmean(not rollout.valid for rollout in rollouts),
        truncated=fmean(rollout.truncated for rollout in rollouts),
    )


def tables(report: Report) -> Iterator[Table]:
    """The report for a terminal."""
    titles = list(report.judgements)
    table = Table("share accepted", *titles, title="Answers whose worth is known", title_justify="left")
    kinds = dict.fromkeys(judgement.probe.kind for said in report.judgements.values() for judgement in said)
    for kind in sorted(kinds, key=lambda kind: kind != REFERENCE):
        table.add_row(kind, *(_percent(accepted(report.judgements[title], kind)) for title in titles))
    yield table
    table = Table("", *titles, title="The rewards", title_justify="left")
    for name, of_right in (("right answers accepted", True), ("wrong answers refused", False)):
        shares = [report.share_right(title, of_right=of_right) for title in titles]
        shown = [
            _percent(share) if title in report.verifiers else "" for title, share in zip(titles, shares, strict=True)
        ]
        table.add_row(name, *shown)
    seconds = [report.seconds(title) for title in titles]
    table.add_row("ms per call, median", *(f"{1e3 * typical:.2f}" for typical, _ in seconds))
    table.add_row("ms per call, worst", *(f"{1e3 * worst:.2f}" for _, worst in seconds))
    failed = [sum(bool(judgement.problem) for judgement in report.judgements[title]) for title in titles]
    table.add_row("answers it could not judge", *map(str, failed))
    if report.samples is not None:
        means = [report.samples.means.get(title, math.nan) for title in titles]
        table.add_row("mean on samples", *("-" if math.isnan(mean) else f"{mean:.3f}" for mean in means))
    yield table
    if report.agreement or report.samples is not None:
        table = Table("", "", show_header=False)
        for pair, share in report.agreement.items():
            table.add_row(f"agreement of {pair}", _percent(share))
        if report.samples is not None:
            found = report.samples
            table.add_row("sampled", f"{found.prompts} prompts, {found.group_size} answers each")
            table.add_row("reward_std: spread within a group", f"{found.reward_std:.3f}")
            table.add_row("prompts that would teach nothing", _percent(found.frac_reward_zero_std))
            table.add_row("answers without a trustworthy reward", _percent(found.invalid))
            table.add_row("truncated", _percent(found.truncated))
        yield table


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _short(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[:longest] + "...")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
