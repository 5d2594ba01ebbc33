"""A reward as a setting: which function, how much it counts, and how YAML spells it.

One of these, shortest first:
    rewards: math_answer
    rewards: [math_answer, {type: format, strict: true, weight: 0.5}, mine.py:brevity]
    rewards: [{use: math_answer, weight: 2.0, after: tags}, {use: {type: format, strict: true}, name: tags}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from groupwise.errors import RewardError, did_you_mean
from groupwise.rewards.answers import ExactMatch, MultipleChoice, RegexMatch
from groupwise.rewards.calls import RewardFunction
from groupwise.rewards.code import Code
from groupwise.rewards.countdown import Countdown
from groupwise.rewards.format import Format
from groupwise.rewards.gym import Gym
from groupwise.rewards.json_schema import JsonSchema
from groupwise.rewards.judge import Judge
from groupwise.rewards.math import MathAnswer
from groupwise.rewards.process import ProcessRewardModel
from groupwise.rewards.prose import Repetition, Script
from groupwise.rewards.reward_model import RewardModel
from groupwise.slots import OneOf, Slot

RULES = (
    MathAnswer,
    ExactMatch,
    RegexMatch,
    MultipleChoice,
    JsonSchema,
    Code,
    Countdown,
    Gym,
    Format,
    Repetition,
    Script,
)
BuiltIn = OneOf(*RULES, RewardModel, ProcessRewardModel, Judge)
CALL_SECONDS = 10.0
"""How long a call may take where nothing says otherwise."""


class Reward(Slot):
    """One reward function, its weight in the sum, and its name in the metrics."""

    use: Annotated[RewardFunction, BuiltIn]
    """`f(rollout) -> float`, or TRL's `f(prompts, completions, **columns) -> list[float]`; a built-in by name, or code
    as `file.py:function`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The reward of a rollout is the sum of weight * value over its rewards."""
    name: str = ""
    """What it is called in metrics and rollouts; empty: the name of the function."""
    trial: bool = True
    """Call it once on a made-up completion before anything is sampled, to find its mistakes early."""
    after: str = ""
    """The name of another reward, the gate: where that one is 0.5 or less, this one is 0 and is not called."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long a call may take (with TRL's signature, for all its completions); null: 10, or what a built-in needs."""
    retries: int = Field(default=0, ge=0)
    """How many more times a call is made that raised, took too long, or took its worker down."""
    memory_mb: int = Field(default=2048, ge=16)
    """What a call may add to the memory of its worker."""

    @model_validator(mode="before")
    @classmethod
    def _spelled_briefly(cls, value: Any) -> Any:
        if isinstance(value, str) or callable(value):
            return {"use": value}
        if isinstance(value, Mapping) and "type" in value and "use" not in value:
            settings = dict(cast(Mapping[str, Any], value))
            family = next(note for note in cls.model_fields["use"].metadata if isinstance(note, OneOf))
            chosen = family.members.get(str(settings["type"]))
            theirs = chosen.model_fields if chosen else {}
            ours = {name: settings.pop(name) for name in cls.model_fields if name in settings and name not in theirs}
            return {"use": settings, **ours}
        return value

    @property
    def limit(self) -> float:
        """The time limit of a call, in seconds."""
        return self.timeout_seconds or float(getattr(self.use, "call_seconds", CALL_SECONDS))

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
    for reward in rewards:
        _check_gate(reward, {reward.title: reward for reward in rewards})
    return rewards


def _check_gate(reward: Reward, named: Mapping[str, Reward]) -> None:
    before = reward
    for _ in named:
        if not before.after:
            return
        if before.after not in named:
            accepted = ", ".join(name for name in named if name != before.title)
            hint = did_you_mean(before.after, named)
            raise ValueError(f"{before.title}.after: {before.after}: no such reward{hint}; accepted: {accepted}")
        before = named[before.after]
    raise ValueError(f"{reward.title}.after: {reward.after}: they wait for each other; take one of the `after`s away")


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
