"""The one typed tree that every setting lives in, and the ways to write it: YAML, `key=value`, Python.

Reading is strict: an unknown key, a wrong type or a combination that cannot be right is a `ConfigError` that names
the path, the value, what is accepted and the way out, all problems in one message.  What was read can be written back
(`to_yaml`) and reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from groupwise.adapters import Lora
from groupwise.advantages import GroupStd, of_group
from groupwise.algorithms import Algorithm
from groupwise.checkpoint import Checkpoint
from groupwise.curriculum import Curriculum
from groupwise.data import Data
from groupwise.demands import Demands, Remarks, refusals
from groupwise.engines import MakeSampler, Optimizer, Sampling
from groupwise.engines.fsdp import Fsdp
from groupwise.engines.local import Here, Local, LocalEngine, Recipe
from groupwise.engines.ranks import Ranks
from groupwise.engines.ray import Ray
from groupwise.engines.vllm import Vllm
from groupwise.errors import ConfigError, did_you_mean
from groupwise.guards import Guards
from groupwise.meeting import check_alone, started
from groupwise.presets import PRESETS
from groupwise.rewards import Rewards
from groupwise.schema import explained
from groupwise.slots import OneOf, Slot, code_path, replace
from groupwise.trees import apply, merge, read_yaml

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

    def refusals(self, demands: Demands) -> Remarks:
        """Held-out prompts that are named twice; see `Refuses.refusals`."""
        yield (
            self.data is not None and self.fraction > 0,
            f"evaluation.fraction: {self.fraction}; evaluation.data names held-out prompts already: set one",
        )

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

    def refusals(self, demands: Demands) -> Remarks:
        """Parts that cannot stand where they are, or not beside each other; see `Refuses.refusals`."""
        learner: Any = self.learner
        yield (
            not isinstance(learner, Slot),
            f"engine.learner: {code_path(learner)}; accepted: local, fsdp; use one of these",
        )
        together, ranked = " and ".join(demands.parts), isinstance(learner, Fsdp) and self.starts_ranks
        apart = not isinstance(self.placement, Here)
        strangers = len(demands.parts) > 1 and apart and not (ranked and self.sampler is None)
        yield strangers, f"{together}; they do not work together yet: use one of them"
        yield (
            ranked and learner.ranks is None,
            "engine.learner.ranks: null; with engine.placement: ray they are actors, on any machine: say how many",
        )
        yield (
            ranked and learner.ranks != 1 and cast(Ray, self.placement).gpus < 1,
            f"engine.placement.gpus: {getattr(self.placement, 'gpus', '')}; with engine.learner: fsdp no two ranks may "
            "share a GPU (NCCL refuses it): use 1",
        )

    @property
    def other_parts(self) -> tuple[str, ...]:
        """The settings that name another part than this process's own, such as `engine.learner: fsdp`."""
        own = Engine.model_fields
        chosen: dict[str, Any] = {name: getattr(self, name) for name in ("learner", "sampler", "placement")}
        return tuple(
            f"engine.{name}: {getattr(part, 'type', None) or code_path(part)}"
            for name, part in chosen.items()
            if type(part) is not type(own[name].default)
        )

    @property
    def shares_weights(self) -> bool:
        """Whether what samples has the very weights that are trained."""
        return isinstance(self.placement, Here) and self.sampler is None

    @property
    def starts_ranks(self) -> bool:
        """Whether it is the placement that starts the ranks of the learner, in other processes than this."""
        return isinstance(self.placement, Ray)

    def to_start(self) -> int:
        """How many processes a command has to start."""
        return 1 if self.starts_ranks else self.learner.to_start()

    def split(self) -> int:
        """Over how many processes the weights are split; 0: sampler and learner share them."""
        return self.learner.split(0 if self.starts_ranks else started())

    def join(self) -> AbstractContextManager[Ranks | None]:
        """Meet the other ranks, where this process is one.

        Raises:
            ConfigError: nobody has started them, or somebody has started what works alone.
        """
        if not self.starts_ranks:
            return self.learner.join(self.device)
        check_alone("engine.placement: ray", "start it once; engine.learner.ranks says how many actors learn")
        return nullcontext()

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
    are behind; 0 samples and trains in turn.  Needs `engine.sampler: vllm` or `engine.placement: ray`."""
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

    @property
    def parts(self) -> tuple[object, ...]:
        """What a run is served by, each of which may have something to say of the rest."""
        engine = self.engine
        return self.lora, engine, engine.learner, engine.sampler, engine.placement, self.evaluation

    @property
    def demands(self) -> Demands:
        """What the parts have to know of the run."""
        entropy, kl = self.algorithm.entropy, self.algorithm.kl
        entropies = {
            "algorithm.selection": self.algorithm.selection is not None,
            "algorithm.entropy.target": entropy is not None and entropy.target is not None,
        }
        return Demands(
            parts=self.engine.other_parts,
            device=self.engine.device,
            sample_tokens=self.engine.sample_tokens,
            largest_request=max(self.group_size, self.evaluation.samples),
            entropies=tuple(path for path, needed in entropies.items() if needed),
            starts_ranks=self.engine.starts_ranks,
            refresh_every=0 if kl is None else kl.refresh_every,
            ahead=self.ahead,
            own_sampler=self.engine.sampler is None,
        )

    def _problems(self) -> Remarks:
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
        yield (
            self.updates_per_step > self.prompts_per_step,
            f"updates_per_step: {self.updates_per_step}; each update needs at least one group: set it to at most "
            f"prompts_per_step: {self.prompts_per_step}, or raise that",
        )
        yield from refusals(self.parts, self.demands)

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
            raise ConfigError(
                *dict.fromkeys(text for detail in error.errors() for text in explained(detail, cls))
            ) from None

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
