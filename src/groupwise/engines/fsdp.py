"""The engine of several processes: the learner's weights, gradients and optimizer are split over them (torch's FSDP2).

    every rank     1/N of the policy, of its gradient and of AdamW's averages; a whole copy of the policy, to sample
    every update   each rank computes its share of the groups; gradients are summed, for the token weights of the loss
                   are global already

Shapes: B rows, T tokens of the longest row, V vocabulary, D hidden size, N ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.demands import Demands, Remarks
from groupwise.engines import Completion, LossFn, Optimizer, Request, Sampler, Sampling
from groupwise.engines.fsdp_critic import FsdpCritic
from groupwise.engines.local import LocalEngine, local_engine
from groupwise.engines.ranks import Dumps, Ranks, everywhere, join
from groupwise.engines.reference import Reference
from groupwise.engines.shard_files import Snapshots, State, names_in, read_state, resume, training_state
from groupwise.engines.shards import Sharded
from groupwise.engines.steps import Steps, published, whole
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.head import at_tokens, learn, products, score
from groupwise.meeting import started
from groupwise.packing import Forward
from groupwise.records import Batch
from groupwise.slots import Slot


class Fsdp(Slot):
    """Several processes, over which weights, gradients and optimizer are split (torch's FSDP2)."""

    type: Literal["fsdp"] = "fsdp"
    ranks: int | None = Field(default=None, ge=1)
    """Processes that `groupwise train` starts on this machine; null starts one for each of its GPUs.  Under torchrun
    it is torchrun that decides; with `engine.placement: ray` they are so many actors, on any machine."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """A rank that leaves the others waiting for longer is given up, and the run ends."""

    def cautions(self, demands: Demands) -> Remarks:
        """Of a number of ranks that is another's to decide; see `Cautions.cautions`."""
        size = started()
        yield (
            bool(size) and self.ranks not in (None, size) and not demands.starts_ranks,
            f"engine.learner.ranks: {self.ranks} has no effect: somebody started this program as {size} processes",
        )

    def to_start(self) -> int:
        """How many processes a command has to start: 1 where somebody has started them."""
        return 1 if started() else self.split(0)

    def split(self, already: int) -> int:
        """Over how many processes the weights are split, where somebody has started so many already."""
        return already or self.ranks or torch.cuda.device_count() or 1

    def join(self, device: str, dumps: Dumps = pickle.dumps) -> contextlib.AbstractContextManager[Ranks]:
        """Meet the other ranks; see `groupwise.engines.ranks.join`.

        Raises:
            ConfigError: nobody has started them.
        """
        if not started() and self.ranks not in (None, 1):
            raise ConfigError(
                f"engine.learner.ranks: {self.ranks}; this program runs once: start it with `torchrun --nproc-per-node "
                f"{self.ranks} PROGRAM.py`, or train with `groupwise train RUN.yaml`"
            )
        return join(self.timeout_seconds, device, dumps)

    def engine(self, ranks: Ranks | None, model: str | Path, **settings: Any) -> LocalEngine:
        """The engine of this rank; the arguments are those of `local_engine`, on every rank the same.

        Raises:
            ModelError: the model or its tokenizer cannot be loaded or served.
        """
        assert ranks is not None, "join comes first"
        made = {"make": partial(FsdpLearner, ranks), "make_critic": partial(FsdpCritic, ranks)}
        engine = local_engine(model, **made, **settings)
        return engine._replace(sampler=SplitSampler(ranks, engine.sampler))


class SplitSampler:
    """Has every rank draw the completions of some of the groups.  See `groupwise.engines.Sampler`."""

    def __init__(self, ranks: Ranks, sampler: Sampler) -> None:
        """
        Args:
            sampler: this rank's own; its model is the one into which the learner gathers its weights.
        """
        self.ranks, self._sampler = ranks, sampler
        ranks.add(self)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights that are in every rank's copy of the policy, as those of `FsdpLearner.weights` are."""
        self._sampler.load(weights, version)
        self._stamp(version)

    @everywhere
    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """See `Sampler.sample`; on rank 0, from all ranks.

        Raises:
            GroupwiseError: what a rank's sampler raises.
        """
        ranks = self.ranks
        try:
            mine: Any = self._sampler.sample(requests[ranks.rank :: ranks.size], sampling)
        except GroupwiseError as error:
            mine = error
        gathered = ranks.gather(mine)
        for found in gathered:
            if isinstance(found, GroupwiseError):
                raise found
        return [gathered[i % ranks.size][i // ranks.size] for i in range(len(requests))] if gathered else []

    @everywhere
    def _stamp(self, version: int) -> None:
        self._sampler.load((), version)
        self.ranks.steps_done = version


class FsdpLearner(Snapshots):
    """Scores tokens and takes AdamW steps with a model that is split over the ranks.  See `groupwise.engines.Learner`.

    Losses, gradients and weights are those of `LocalLearner`, up to the order in which the ranks' sums are added.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        temperature: float,
        microbatch_tokens: int,
        total_updates: int,
        reference: Callable[[], PreTrainedModel] | None = None,
        entropy: bool = False,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            ranks: this one among all.
            model: the policy to begin with, on every rank the same; `weights` brings it up to date.  What does not
                require a gradient is not trained.  Adapted, it is its own reference, with the adapter off.
            optimizer: AdamW and its schedule.
            temperature: logits are divided by it; that of sampling.
            microbatch_tokens: most tokens, padding included, in one forward pass of a rank.
            total_updates: optimizer steps over which the schedule falls to 0.
            reference: what loads the reference policy when it is first asked for, on every rank the same.
            entropy: hand the loss the entropies of the policy; otherwise they are 0.
            mixed: gather the layers and take their products in bfloat16; shards, gradients and all else stay float32.
        """
        self._whole, self._policy = model, Sharded(Forward(model, mixed), ranks)
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._entropy, self._mixed = entropy, mixed
        split = None if reference is None else lambda: Sharded(Forward(reference(), mixed), ranks)
        self._reference = Reference(self._policy, self._policy.forward.model, split)
        self._steps = Steps(self._policy.parameters.values(), optimizer, total_updates)
        super().__init__(ranks)

    @everywhere
    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See `Learner.logprobs`.

        Raises:
            GroupwiseError: `reference` is asked for and there is none.
        """
        with self._reference.running() if reference else contextlib.nullcontext(self._policy) as policy:

            def scored(part: Batch) -> Tensor:
                states, targets = policy.forward.states(part), part.tokens[part.loss_mask]
                with products(self._mixed):
                    logprobs, _ = score(policy.forward.model, states, targets, self._temperature, False)
                return at_tokens(part.loss_mask, logprobs)

            return policy.for_each_token(batch, self._microbatch_tokens, scored)

    @everywhere
    def update(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> dict[str, float]:
        """See `Learner.update` and `LocalLearner.update`; the metrics are of the whole batch on rank 0 alone.

        Raises:
            NumericalError: loss or gradient is not finite, and that on every rank; nothing was changed.
        """
        sums: dict[str, Tensor] = {}

        def accumulate() -> float:
            total = torch.zeros((), dtype=torch.float64)
            with self._policy.passes(batch, self._microbatch_tokens) as passes:
                for rows, part in passes:
                    value, metrics = learn(
                        self._policy.forward.model,
                        self._policy.run(self._policy.forward.states, part),
                        part,
                        loss if len(rows) else _nothing,
                        self._temperature,
                        entropy=self._entropy,
                        per_token=per_token,
                        mixed=self._mixed,
                    )
                    total += value.cpu()
                    for name, metric in metrics.items():
                        sums[name] = sums.get(name, 0) + metric.cpu()
            return float(self.ranks.sum(total))

        taken = self._steps.take(accumulate)
        totals: dict[str, Tensor] = {}
        for of_rank in self.ranks.gather(sums):
            for name, metric in of_rank.items():
                totals[name] = totals.get(name, 0) + metric
        means = {name: metric.tolist() for name, metric in totals.items()}
        return {name: value / count for name, (value, count) in means.items() if count} | taken

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy, as `LocalLearner.weights`; they are gathered into the whole copy of every
        rank, one after the other."""
        self._gather()
        return published(self._whole)

    @everywhere
    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference.

        Raises:
            GroupwiseError: the policy is adapted, so that its base is the reference.
        """
        reference = self._reference.to_move()
        with torch.no_grad():
            for name, parameter in self._policy.parameters.items():
                reference.parameters[name].copy_(parameter)

    @everywhere
    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote, on however many ranks; the optimizer's settings stay those given here.

        Raises:
            CheckpointError: on every rank: a file is missing or damaged, or is not that of this model.
        """
        self._reference.moved = "reference" in names_in(path, self.ranks)
        state = self._state()
        read_state(path, state)
        resume(self._steps, state)

    @everywhere
    def _gather(self) -> None:
        own = dict(self._whole.named_parameters())
        with torch.no_grad():
            for name, shard in self._policy.trained():
                own[name].copy_(whole(shard))

    def _state(self) -> State:
        """What is trained, AdamW's averages and, if it has moved, the reference."""
        state = training_state(self._policy, self._steps)
        if self._reference.moved:
            state["reference"] = {name: shard.data for name, shard in self._reference.own().parameters.items()}
        return state


def _nothing(logprobs: Tensor, entropies: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a row that keeps the others company: it has no gradient."""
    return logprobs.new_zeros(()), {}
