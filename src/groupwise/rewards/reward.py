"""A reward as a setting: which function, how much it counts, and how YAML spells it.

One of these, shortest first:
    rewards: math_answer
    rewards: [math_answer, {type: format, strict: true, weight: 0.5}, mine.py:brevity]
    rewards: [{use: math_answer, weight: 2.0}, {use: {type: format, strict: true}, name: tags}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from groupwise.errors import RewardError
from groupwise.rewards.answers import ExactMatch, MathAnswer, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.countdown import Countdown
from groupwise.rewards.format import Format
from groupwise.rewards.gym import Gym
from groupwise.slots import OneOf, Slot


class Reward(Slot):
    """One reward function, its weight in the sum, and its name in the metrics."""

    use: Annotated[RewardFunction, OneOf(MathAnswer, ExactMatch, RegexMatch, Format, Countdown, Gym)]
    """`f(rollout) -> float`, or TRL's `f(prompts, completions, **columns) -> list[float]`; a built-in by name, or code
    as `file.py:function`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The reward of a rollout is the sum of weight * value over its rewards."""
    name: str = ""
    """What it is called in metrics and rollouts; empty: the name of the function."""
    trial: bool = True
    """Call it once on a made-up completion before anything is sampled, to find its mistakes early."""

    @model_validator(mode="before")
    @classmethod
    def _spelled_briefly(cls, value: Any) -> Any:
        if isinstance(value, str) or callable(value):
            return {"use": value}
        if isinstance(value, Mapping) and "type" in value and "use" not in value:
            settings = dict(cast(Mapping[str, Any], value))
            ours = {name: settings.pop(name) for name in ("weight", "name", "trial") if name in settings}
            return {"use": settings, **ours}
        return value

    @property
    def title(self) -> str:
        """The name that metrics and messages use."""
        own = getattr(self.use, "type" if isinstance(self.use, Slot) else "__name__", type(self.use).__name__)
        return self.name or str(own)


RewardLike = Reward | RewardFunction | str | Mapping[str, Any]
"""What `as_rewards` turns into a `Reward`."""


def _several(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def _distinct(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    titles = [reward.title for reward in rewards]
    if not titles:
        raise ValueError("there is none; name at least one, such as math_answer")
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise ValueError(f"two rewards are called {twice}; give one of them another `name`")
    return rewards


Rewards = Annotated[tuple[Reward, ...], BeforeValidator(_several), AfterValidator(_distinct)]
"""The type of a setting that holds rewards: at least one, each with its own name."""

_REWARDS: TypeAdapter[tuple[Reward, ...]] = TypeAdapter(Rewards)


def as_rewards(values: RewardLike | Sequence[RewardLike]) -> tuple[Reward, ...]:
    """Rewards from what a run file or a call spells: names, mappings, functions, or `Reward`s.

    Raises:
        RewardError: an unknown name or setting, code that cannot be found, or two rewards of one name.
    """
    try:
        return _REWARDS.validate_python(values)
    except ValidationError as error:
        found = [(".".join(["rewards", *map(str, problem["loc"])]), problem["msg"]) for problem in error.errors()]
        raise RewardError("; ".join(f"{path}: {message}" for path, message in found)) from error
