"""The memory that a run takes by its settings: what trains, and what samples beside it in the same memory."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from groupwise import demands
from groupwise.config import Config
from groupwise.engines.ray import Ray
from groupwise.resources import Memory, key_value_count, memory_of


def footprint(config: Config, model: PreTrainedModel, *, tokens: int, adapter: int | None, **known: Any) -> Memory:
    """The memory of an update, and of the samplers that are there all the time.

    Args:
        config: with `engine.dtype` chosen.
        model: of which only the shapes are looked at.
        tokens: of one micro-batch.
        adapter: how many weights the adapter has that is trained in the model's place; None: there is none.
        known: more fields of `Memory`, such as `samplers`, or others than those of the settings.
    """
    settings: dict[str, Any] = {
        # With an adapter the reference is the model itself, without it.
        "reference": adapter is None and "ref_logprobs" in config.algorithm.needs(config.updates_per_step),
        "critic": config.algorithm.critic is not None,
        "checkpointing": config.engine.gradient_checkpointing,
        "trained": adapter,
        "adapted": adapter or 0,
        "ranks": config.engine.split(),
        "cached": config.engine.sample_tokens * cached_bytes(config, model),
    }
    return memory_of(model, config.engine.weights, tokens=tokens, **{**settings, **known})


def cached_bytes(config: Config, model: PreTrainedModel) -> int:
    """Size of the keys and values of one token."""
    return key_value_count(model) * config.engine.weights.itemsize


def beside(config: Config, *, gpu: bool) -> dict[str, int]:
    """Who is in the memory in which the learner trains: `samplers` with weights of their own, and its `together`."""
    engine = config.engine
    # Ranks that were started one by one know their share of a machine's memory; actors of Ray are told of all of it.
    actors = isinstance(engine.placement, Ray) and not engine.placement.address and not gpu
    return {"samplers": demands.copies(config.parts, gpu=gpu), "together": max(engine.split(), 1) if actors else 1}
