"""The one typed tree that every setting lives in, and the ways to write it: YAML, `key=value`, Python.

Reading is strict: an unknown key, a wrong type or a combination that cannot be right is a `ConfigError` that names
the path, the value, what is accepted and the way out, all problems in one message.  What was read can be written back
(`to_yaml`) and reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

import torch
import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from groupwise.adapters import Lora
from groupwise.advantages import GroupStd, of_group
from groupwise.algorithms import Algorithm
from groupwise.checkpoint import Checkpoint
from groupwise.curriculum import Curriculum
from groupwise.data import Data
from groupwise.engines import MakeSampler, Optimizer, Sampling
from groupwise.engines.fsdp import Fsdp
from groupwise.engines.local import Here, Local, LocalEngine, Recipe
from groupwise.engines.ray import Ray
from groupwise.engines.vllm import Vllm
from groupwise.errors import ConfigError, did_you_mean
from groupwise.guards import Guards
from groupwise.presets import PRESETS
from groupwise.rewards import Rewards
from groupwise.slots import OneOf, Slot, code_path, replace

Tree = dict[str, Any]
TRL_NAMES = {
    "beta": "algorithm.kl.coef",
    "epsilon": "algorithm.surrogate.low, and high",
    "epsilon_high": "algorithm.surrogate.high",
    "generation_batch_size": "prompts_per_step times group_size",
    "loss_type": "algorithm, by the name of a preset",
    "max_completion_length": "sampling.max_tokens",
    "max_steps": "steps",
    "num_generations": "group_size",
    "num_iterations": "updates_per_step, each on its share of the groups",
    "per_device_train_batch_size": "engine.train_tokens, which changes no result",
    "scale_rewards": "algorithm.scale",
    "steps_per_generation": "updates_per_step, each on its share of the groups",
}


def algorithm_by_name(value: Any) -> Any:
    """`dapo`, or `{preset: dapo, surrogate: {high: 0.3}}`, as an `Algorithm` or the settings of one.

    Without a preset the changes are to the default algorithm.
    """
    if isinstance(value, str):
        return preset(value)
    if isinstance(value, Mapping):
        settings = dict(cast(Mapping[str, Any], value))
        base = preset(str(settings.pop("preset"))) if "preset" in settings else Algorithm()
        return merge(base.model_dump(mode="json"), settings)
    return value


def preset(name: str) -> Algorithm:
    """The named algorithm.

    Raises:
        PydanticCustomError: there is none of this name.
    """
    if name not in PRESETS:
        raise PydanticCustomError(
            "no_preset",
            "no such algorithm{hint}; accepted: {names}",
            {"hint": did_you_mean(name, PRESETS), "names": ", ".join(PRESETS)},
        )
    return PRESETS[name]


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of a preset or of a run file.

    Raises:
        ConfigError: it is neither, or a setting of the file is wrong.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_file():
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(
            f"{name}: no such algorithm or run file{hint}; accepted: {', '.join(PRESETS)}, or a .yaml file"
        )
    return Config.load(name).resolve().algorithm


def merge(base: Any, changes: Any) -> Any:
    """`changes` laid over `base`; a member that is named by its `type` starts from that type's own defaults."""
    if not isinstance(base, dict) or not isinstance(changes, Mapping):
        return changes
    under, over = cast(Tree, base), cast(Mapping[str, Any], changes)
    if "type" in over:
        return dict(over)
    return {**under, **{name: merge(under.get(name), value) for name, value in over.items()}}


class Evaluation(Slot):
    """Held-out prompts, answered before, during and after training."""

    data: Data | None = None
    """The prompts; null for no evaluation, or for a `fraction` of the training prompts."""
    fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of `data` that is held out in place of `evaluation.data`, by a hash of each prompt."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    samples: int = Field(default=1, ge=1)
    """Completions for each prompt; with several, pass@k and maj@k are estimated, too."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens; null takes `sampling.max_tokens`."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most likely tokens whose probabilities reach this sum; 1 draws from all."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many most likely tokens; 0 draws from all."""

    def sampling(self, training: Sampling) -> Sampling:
        """How held-out completions are drawn, where those of training are drawn like this."""
        longest = training.max_tokens if self.max_tokens is None else self.max_tokens
        return Sampling(max_tokens=longest, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class Engine(Slot):
    """What computes, and how much at once."""

    learner: Annotated[Local | Fsdp, OneOf(Local, Fsdp)] = Local()
    """Where the policy is trained: in this process, or split over several."""
    device: str = "auto"
    """`auto` takes the first CUDA GPU if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float64"] = "auto"
    """Of weights and activations; log-probs and losses are float32 at least.  `mixed` keeps weights in float32 and
    takes matrix products in bfloat16; `auto` is mixed where that is faster (a CPU with AMX, a model of 10 M parameters
    or more), else float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; null measures whether one or all are faster for products of the model's size."""
    train_tokens: int = Field(default=0, ge=0)
    """Most tokens of one micro-batch; 0 goes by the memory that is free.  The result does not change."""
    sample_tokens: int = Field(default=0, ge=0)
    """Most tokens whose keys and values are held while sampling; 0 goes by the memory that is free."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter more time."""
    sampler: Annotated[MakeSampler | None, OneOf(Vllm)] = None
    """What samples in training; null is the learner's own model, in this process."""
    placement: Annotated[Callable[[Recipe], LocalEngine], OneOf(Here, Ray)] = Here()
    """Where sampler and learner run."""

    @property
    def shares_weights(self) -> bool:
        """Whether what samples has the very weights that are trained."""
        return isinstance(self.placement, Here)

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float32 if self.dtype in ("auto", "mixed") else getattr(torch, self.dtype)


class Config(Slot):
    """Everything a run is made of."""

    refused: ClassVar[Mapping[str, str]] = {
        name: f"is TRL's name; here it is {ours} (`groupwise import trl` converts a whole configuration)"
        for name, ours in TRL_NAMES.items()
    }

    model: str
    """Folder or hub id of a Hugging Face causal language model."""
    data: Data
    """The prompts to train on."""
    rewards: Rewards
    """Reward functions by name (`math_answer`), as code (`file.py:function`), or with settings and a weight.  The first
    one is the headline of evaluations."""
    algorithm: Annotated[Algorithm, BeforeValidator(algorithm_by_name)] = Algorithm()
    """The name of a preset, `{preset: NAME, ...changes}`, or slots."""
    steps: int = Field(default=100, ge=1)
    """Rounds of sampling and updating."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts, and so groups, of one step."""
    group_size: int = Field(default=8, ge=1)
    """G: completions for each prompt."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps on the rollouts of one step, each on its share of the groups."""
    ahead: int = Field(default=0, ge=0)
    """Steps that may be sampled ahead while the learner trains, and so the most steps that the weights which sampled
    are behind; 0 samples and trains in turn.  Needs `engine.placement: ray`."""
    seed: int = 0
    """Decides everything random."""
    curriculum: Curriculum | None = None
    """Which prompts are skipped for a while, going by how the policy did on them; null: none."""
    sampling: Sampling = Sampling()
    """How completions are drawn in training."""
    optimizer: Optimizer = Optimizer()
    """How the policy takes a step."""
    lora: Lora | None = None
    """Train an adapter instead of the model, as in `{rank: 16}`: far less memory; null trains the whole model."""
    critic_optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    """How the critic takes a step, where the algorithm has one (PPO)."""
    engine: Engine = Engine()
    """What computes, and how much at once."""
    evaluation: Evaluation = Evaluation()
    """Held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept to continue from."""
    guards: Guards = Guards()
    """What a run stops at, and what it warns of."""
    max_invalid_fraction: float = Field(default=0.25, ge=0, le=1)
    """The run stops when more of a step's rollouts than this have no trustworthy reward."""
    sampling_rounds: int = Field(default=4, ge=1)
    """With `filter: dynamic_sampling`: at most this many rounds of prompts to fill a step with informative groups."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)] = ()
    """Also write the numbers of metrics.jsonl for these tools, each an extra of the same name; on this machine."""
    output: str | None = None
    """The run folder; null makes a new one under `runs/`."""

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        problems = [problem for wrong, problem in self._problems() if wrong]
        if problems:
            raise PydanticCustomError("together", "{problems}", {"problems": "\n".join(problems)})
        return self

    def _problems(self) -> Iterator[tuple[bool, str]]:
        s = self.sampling
        yield (
            self.group_size < 2 and of_group(self.algorithm.baseline),
            f"group_size: {self.group_size}; a group of one has no baseline to beat: use 2 or more "
            "(8 is a good start), or an algorithm with baseline: none, such as reinforce",
        )
        alone = self.group_size < 2 and not of_group(self.algorithm.baseline)
        yield (
            alone and isinstance(self.algorithm.scale, GroupStd),
            f"group_size: {self.group_size}; a group of one has no spread to divide by: set algorithm.scale: none",
        )
        yield (
            s.temperature == 0,
            "sampling.temperature: 0; all completions of a group would be the same: use a value above 0, such as 1.0",
        )
        yield (
            s.top_p < 1 or s.top_k > 0,
            f"sampling.top_p: {s.top_p}, sampling.top_k: {s.top_k}; training scores the whole distribution, so the "
            "sampled one must not be cut: use top_p: 1 and top_k: 0 (evaluation.top_p and evaluation.top_k may cut it)",
        )
        server, entropy = self.engine.sampler, self.algorithm.entropy
        largest = max(self.group_size, self.evaluation.samples)
        yield (
            isinstance(server, Vllm) and server.url is None and server.max_sequences < largest,
            f"engine.sampler.max_sequences: {getattr(server, 'max_sequences', '')}; a group is one request: set it to "
            f"at least {largest}, the larger of group_size and evaluation.samples",
        )
        for path, needed in (
            ("algorithm.selection", self.algorithm.selection is not None),
            ("algorithm.entropy.target", entropy is not None and entropy.target is not None),
        ):
            yield (
                needed and isinstance(server, Vllm),
                f"{path}: needs the entropies of what was sampled, which engine.sampler: vllm does not report; leave "
                "it out, or sample in this process with engine.sampler: none",
            )
        kl = self.algorithm.kl
        yield (
            self.lora is not None and kl is not None and kl.refresh_every > 0,
            f"algorithm.kl.refresh_every: {kl and kl.refresh_every}; with lora the reference is the base model, which "
            "cannot move: use refresh_every: 0, or lora: null",
        )
        learner: Any = self.engine.learner
        yield (
            not isinstance(learner, Slot),
            f"engine.learner: {code_path(learner)}; accepted: local, fsdp; use one of these",
        )
        yield (
            isinstance(learner, Fsdp) and self.algorithm.critic is not None,
            "algorithm.critic: with engine.learner: fsdp there is none yet; use engine.learner: local, or an algorithm "
            "without a critic, such as grpo",
        )
        yield (
            self.updates_per_step > self.prompts_per_step,
            f"updates_per_step: {self.updates_per_step}; each update needs at least one group: set it to at most "
            f"prompts_per_step: {self.prompts_per_step}, or raise that",
        )
        given = {
            "engine.learner: fsdp": isinstance(learner, Fsdp),
            "engine.sampler: vllm": self.engine.sampler is not None,
            "engine.placement: ray": not self.engine.shares_weights,
        }
        together = " and ".join(name for name, is_given in given.items() if is_given)
        yield sum(given.values()) > 1, f"{together}; they do not work together yet: use one of them"
        yield (
            isinstance(self.engine.placement, Ray) and self.engine.device.startswith("cuda:"),
            f"engine.device: {self.engine.device}; with engine.placement: ray each actor gets its own; use auto, cuda "
            "or cpu",
        )
        alone = self.engine.sampler is None and isinstance(learner, Local)
        yield (
            self.ahead > 0 and self.engine.shares_weights,
            f"ahead: {self.ahead}; with engine.placement: local sampler and learner share one model, which cannot be "
            "sampled from while it is trained: set engine.placement: ray, or ahead: 0"
            if alone
            else f"ahead: {self.ahead}; works with engine.placement: ray alone, yet: leave out engine.sampler and "
            "engine.learner and set that, or ahead: 0",
        )
        yield (
            self.evaluation.data is not None and self.evaluation.fraction > 0,
            f"evaluation.fraction: {self.evaluation.fraction}; evaluation.data names held-out prompts already: set one",
        )

    def resolve(self) -> Config:
        """The same settings with everything that depends on others filled in."""
        return replace(self, algorithm=self.algorithm.resolve(self.sampling.max_tokens))

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Config:
        """The settings of a tree of plain values.

        Raises:
            ConfigError: names every problem in the tree.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(*dict.fromkeys(text for detail in error.errors() for text in _explain(detail))) from None

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
        """The settings of a YAML file, with `dotted.key=value` overrides on top.

        Raises:
            ConfigError: the file is not there or is no YAML mapping, or a setting in it is wrong.
        """
        tree = read_yaml(Path(path)) if path is not None else {}
        for override in overrides:
            apply(tree, override)
        return cls.parse(tree)

    def to_yaml(self) -> str:
        """The whole tree as YAML, defaults included; reads back equal."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# YAML and overrides --------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-6` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, or it does not hold a mapping.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such run file; write one, or give settings as --model DIR --data FILE key=value")
    try:
        tree = yaml.load(path.read_bytes(), _Loader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML: {found}; mend that place, and save it as UTF-8") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}; a run file is a mapping of settings, as in model: DIR")
    return cast(Tree, tree)


def apply(tree: Tree, override: str) -> None:
    """Set `dotted.key=value` in a tree; the value is read as YAML.

    Raises:
        ConfigError: there is no `=`, the value is no YAML, or the key leads through a value that holds no settings.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: not a setting; write dotted.key=value, such as optimizer.learning_rate=1e-5")
    place: Any = tree
    *parents, last = key.split(".")
    for name in parents:
        place = _step_into(place, name, key)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {text!r} is not valid YAML: {found}; put text with special signs in quotes"
        ) from error
    if isinstance(place, list):
        place[_index(cast(list[Any], place), last, key)] = value
    else:
        place[last] = value


def _step_into(place: Any, name: str, key: str) -> Any:
    index: Any = _index(cast(list[Any], place), name, key) if isinstance(place, list) else name
    below = place[index] if isinstance(place, list) else place.get(index)
    if isinstance(below, str) and name == "algorithm":
        below = {"preset": below}
    if isinstance(below, str):
        below = {"type": below}
    if below is None:
        below = {}
    if not isinstance(below, dict | list):
        raise ConfigError(f"{key}: {name} is {below!r} and holds no settings; write {name}=VALUE")
    place[index] = below
    return cast(Any, below)


def _index(place: list[Any], name: str, key: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ConfigError(f"{key}: {name} is not a place in a list of {len(place)}; use 0 to {len(place) - 1}")
    return int(name)


# Errors in words -----------------------------------------------------------------------------------------------------


def _explain(detail: ErrorDetails) -> list[str]:
    """What one of pydantic's errors says: usually one problem, several where settings were checked together."""
    path, owner = _locate(detail["loc"])
    value, messages = detail["input"], detail["msg"].removeprefix("Value error, ").split("\n")
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        if owner and name in owner.refused:
            return [f"{path}: {value!r}; {owner.refused[name]}"]
        known = list(owner.model_fields) if owner else []
        elsewhere = next((path for path, _, _ in reference() if path.endswith(f".{name}")), "")
        hint = f" (did you mean {elsewhere}?)" if elsewhere else did_you_mean(name, known)
        return [f"{path}: no such setting{hint}; accepted: {', '.join(known)}"]
    if detail["type"] == "missing":
        return [f"{path}: missing; {_description(owner, name)}"]
    if detail["type"] == "together" or not path:
        return messages
    shown = "" if isinstance(value, Slot | Mapping) else f" {value!r};"
    field = owner.model_fields.get(name) if owner else None
    default = "" if field is None or field.is_required() or not shown else _short(field.default)
    usual = f"; the default is {default}" if default else ""
    return [f"{path}:{shown} {message[:1].lower()}{message[1:]}{usual}" for message in messages]


def _description(owner: type[Slot] | None, name: str) -> str:
    field = owner.model_fields.get(name) if owner else None
    text = " ".join((field.description or "").split()) if field else ""
    return f"set {name}: {text}" if text else f"set {name}"


def _locate(loc: tuple[int | str, ...]) -> tuple[str, type[Slot] | None]:
    """The dotted path of an error without pydantic's own steps, and the slot that owns its last name."""
    path, below, members = "", cast("type[Slot] | None", Config), cast("OneOf | None", None)
    owner = below
    for item in loc:
        if members is not None and item in members.members:
            # Pydantic names the member that was taken; the path that the user wrote does not.
            below, members = members.members[str(item)], None
            continue
        owner = below
        path += f"[{item}]" if isinstance(item, int) else f"{'.' if path else ''}{item}"
        field = owner.model_fields.get(str(item)) if owner is not None and isinstance(item, str) else None
        if field is None:
            continue
        members = next((note for note in field.metadata if isinstance(note, OneOf)), None)
        inner = _slot_in(field.annotation)
        below = inner if inner is not None or members is not None else owner
    return path, owner


def _slot_in(annotation: Any) -> type[Slot] | None:
    """The slot class inside `Slot`, `Slot | None`, `tuple[Slot, ...]`, ..."""
    if isinstance(annotation, type) and issubclass(annotation, Slot):
        return annotation
    return next((found for found in map(_slot_in, get_args(annotation)) if found), None)


# Reference -----------------------------------------------------------------------------------------------------------


def reference(slot: type[Slot] = Config, prefix: str = "", made: Slot | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted path, default, what it does) of each setting; a member of a family is `path[member]`.

    `made` is the value that stands in the tree when nothing is set; its settings are the defaults, not its class's.
    """
    for name, field in slot.model_fields.items():
        below = _slot_in(field.annotation)
        path = f"{prefix}{name}"
        text = " ".join((field.description or "").split())
        if name == "type":
            continue
        default = field.get_default() if made is None else getattr(made, name)
        yield path, "required" if field.is_required() else _short(default), text
        if below is not None:
            yield from reference(below, f"{path}.", default if isinstance(default, below) else None)
        for member, choice in members_of(field.metadata).items():
            yield f"{path}[{member}]", "", " ".join((choice.__doc__ or "").split("\n\n")[0].split())
            yield from reference(choice, f"{path}[{member}].")


def members_of(metadata: Sequence[Any]) -> dict[str, type[Slot]]:
    """The slots that a field annotated with `OneOf` chooses from."""
    return next((note.members for note in metadata if isinstance(note, OneOf)), {})


def _short(value: Any) -> str:
    if isinstance(value, Slot):
        return str(getattr(value, "type", ""))
    plain: Any = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).split("\n")[0]
