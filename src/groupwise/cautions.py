"""What a run is warned of by its settings alone: what runs, but is rarely meant, and what has no effect."""

from __future__ import annotations

import math

from groupwise import combinations, demands
from groupwise.config import Config, Evaluation
from groupwise.demands import Remarks
from groupwise.losses import Reinforce
from groupwise.shaping import SoftOverlong
from groupwise.slots import changed

LOWEST_TEMPERATURE = 0.1
"""Below this a model rarely says two different things."""


def cautions(config: Config) -> list[str]:
    """What will run, but is rarely meant or has no effect."""
    found = (
        *combinations.cautions(config.algorithm),
        *_of_the_algorithm(config),
        *_of_sampling(config),
        *_of_the_schedule(config),
        *_of_evaluation(config.evaluation),
        *demands.cautions(config.parts, config.demands),
    )
    return [text for applies, text in found if applies]


def _of_the_algorithm(config: Config) -> Remarks:
    # What a run wrote down has every setting, so that one was set does not yet mean that it was meant.
    meant, algorithm = changed(config), config.algorithm
    yield (
        algorithm.filter != "dynamic_sampling" and "sampling_rounds" in meant,
        "sampling_rounds has no effect without algorithm.filter: dynamic_sampling",
    )
    yield (
        algorithm.critic is None and "critic_optimizer" in meant,
        "critic_optimizer has no effect without algorithm.critic",
    )
    yield (
        algorithm.supervision == "process"
        and not any(getattr(reward.use, "gives_steps", False) for reward in config.rewards),
        "algorithm.supervision: process learns from the rewards of steps, and none of these rewards is known to give "
        "them: add a process_reward_model, or return StepRewards from a function that says gives_steps",
    )
    kl = algorithm.kl
    yield (
        kl is not None and kl.to == "old" and config.updates_per_step == 1,
        "algorithm.kl.to: old is the current policy when updates_per_step is 1: the KL has no effect",
    )
    yield (
        kl is not None and kl.coef == 0,
        "algorithm.kl has no effect with coef: 0, and is not measured; set kl: none, or a coef above 0",
    )
    shaping = algorithm.shaping
    yield (
        isinstance(shaping, SoftOverlong)
        and shaping.limit is not None
        and config.sampling.max_tokens <= shaping.limit * (1 - shaping.cache_fraction),
        f"algorithm.shaping has no effect: completions end at sampling.max_tokens: {config.sampling.max_tokens}, "
        "before the penalty begins; lower shaping.limit, or leave it out",
    )


def _of_sampling(config: Config) -> Remarks:
    algorithm = config.algorithm
    yield (
        config.ahead > 0 and isinstance(algorithm.surrogate, Reinforce) and not algorithm.weighs_age,
        f"ahead: {config.ahead}; what an older policy sampled is trained on as if the current one had: this surrogate "
        "has neither a ratio nor a correction beside it; set algorithm.correction: importance",
    )
    yield (
        config.ahead > 0 and algorithm.filter == "dynamic_sampling",
        f"ahead: {config.ahead}; what dynamic sampling draws beyond a step is thrown away: it would be too old for "
        "the next one",
    )
    yield (
        config.sampling.temperature < LOWEST_TEMPERATURE,
        f"sampling.temperature: {config.sampling.temperature} makes the completions of a group nearly all the same, "
        "and such a group teaches nothing",
    )
    yield (
        config.engine.dtype == "bfloat16",
        "engine.dtype: bfloat16 holds the weights themselves in bfloat16: small optimizer steps round away "
        "(1e-6 nearly always); use float32 unless memory forbids",
    )
    yield (
        config.curriculum is not None and config.group_size == 1,
        "curriculum takes every prompt for always or never solved when group_size is 1",
    )


def _of_the_schedule(config: Config) -> Remarks:
    updates = config.steps * config.updates_per_step
    for path, slot in (("evaluation.every", config.evaluation), ("checkpoint.every", config.checkpoint)):
        yield (
            slot.every > config.steps and "every" in changed(slot),
            f"{path}: {slot.every} is never reached in steps: {config.steps}; only the end counts",
        )
    common = math.lcm(config.evaluation.every, config.checkpoint.every)  # 0 where one of them is
    for name in sorted({"keep_last", "keep_every", "keep_best"} & changed(config.checkpoint)):
        yield (
            config.checkpoint.every == 0,
            f"checkpoint.{name} has no effect with checkpoint.every: 0: there is one checkpoint, at the end",
        )
    yield (
        config.checkpoint.keep_best > 0 and not 0 < common < config.steps,
        "checkpoint.keep_best has no effect: no checkpoint has a score, for none before the last is saved at a step "
        f"that is evaluated; set evaluation.every (now {config.evaluation.every}) to checkpoint.every, or to a part "
        "of it",
    )
    yield (
        config.optimizer.warmup_updates > updates,
        f"optimizer.warmup_updates: {config.optimizer.warmup_updates} is more than the run's {updates} updates: "
        "the learning rate never reaches its peak",
    )


def _of_evaluation(evaluation: Evaluation) -> Remarks:
    yield (
        evaluation.samples > 1 and evaluation.temperature == 0,
        "evaluation.samples has no effect at evaluation.temperature: 0: all answers are the same",
    )
    yield (
        evaluation.temperature == 0 and bool({"top_p", "top_k"} & changed(evaluation)),
        "evaluation.top_p and evaluation.top_k have no effect at evaluation.temperature: 0",
    )
    for name in sorted(changed(evaluation) - {"data"}) if evaluation.data is None and not evaluation.fraction else ():
        yield True, f"evaluation.{name} has no effect without evaluation.data or evaluation.fraction"
