"""Learning with a transformers model in this process: a packed forward pass, the head in chunks, AdamW.

Shapes: B rollouts, T tokens of the longest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.adapters import adapted, trained
from groupwise.engines import LossFn, Optimizer, Snapshot
from groupwise.engines.reference import Reference
from groupwise.engines.steps import Steps, all_of, copied, published, restore_weights, weights_file
from groupwise.head import at_tokens, learn, products, score
from groupwise.packing import Forward
from groupwise.records import Batch

REFERENCE = "reference.safetensors"


class LocalLearner:
    """Scores tokens and takes AdamW steps with a transformers model.  See `groupwise.engines.Learner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        temperature: float,
        microbatch_tokens: int,
        total_updates: int,
        reference: PreTrainedModel | Callable[[], PreTrainedModel] | None = None,
        entropy: bool = False,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            model: the policy; parameters that do not require a gradient are left alone.  Adapted, it is its own
                reference, with the adapter off.
            optimizer: AdamW and its schedule.
            temperature: logits are divided by it; that of sampling.
            microbatch_tokens: most tokens, padding included, in one forward pass; a longer row still runs, alone.
            total_updates: optimizer steps over which the schedule falls to 0.
            reference: the reference policy, or what loads it when it is first asked for.
            entropy: hand the loss the entropies of the policy; otherwise they are 0.
            mixed: take matrix products in bfloat16; weights, gradients and all else stay float32.
        """
        self._model, self._adapted = model, adapted(model)
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self._forward = Forward(model, mixed)
        load = (lambda: reference) if isinstance(reference, PreTrainedModel) else reference
        self._reference = Reference(self._forward, model, None if load is None else lambda: Forward(load(), mixed))
        self._entropy = entropy
        self._steps = Steps(model.parameters(), optimizer, total_updates)

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """See `Learner.logprobs`.

        Raises:
            GroupwiseError: `reference` is asked for and there is none.
        """
        with self._reference.running() if reference else contextlib.nullcontext(self._forward) as forward:

            def scored(part: Batch) -> Tensor:
                targets = part.tokens[part.loss_mask]
                states = forward.states(part)
                with products(self._forward.mixed):
                    return at_tokens(part.loss_mask, score(forward.model, states, targets, self._temperature, False)[0])

            return forward.for_each_token(batch, self._microbatch_tokens, scored)

    def update(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> dict[str, float]:
        """See `Learner.update`.  `loss`, `grad_norm` (before clipping) and `learning_rate` are among the metrics.

        A batch without rows is a step with zero gradient: AdamW's averages, and with them the weights, move on.

        Raises:
            NumericalError: loss or gradient is not finite; weights and optimizer are as they were.
        """
        sums: dict[str, Tensor] = {}
        taken = self._steps.take(lambda: self._accumulate(batch, loss, per_token, sums))
        totals = {name: metric.tolist() for name, metric in sums.items()}
        return {name: value / count for name, (value, count) in totals.items() if count} | taken

    def gradient(self, batch: Batch, loss: LossFn, *, per_token: bool = False) -> list[Tensor]:
        """The gradient of what `update` would minimise, for each trained parameter, on the CPU; nothing is changed."""
        parameters = self._trainable()
        self._accumulate(batch, loss, per_token, {})
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [gradient.cpu() for gradient in found]

    @property
    def gradient_bytes(self) -> int:
        """What one gradient takes."""
        return sum(parameter.nbytes for parameter in self._trainable())

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _accumulate(self, batch: Batch, loss: LossFn, per_token: bool, sums: dict[str, Tensor]) -> float:
        """Add the gradient to that of the parameters, and the metrics to `sums`; the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._model.device)
        with self._forward.microbatches(batch, self._microbatch_tokens) as parts:
            for _, part in parts:
                value, metrics = learn(
                    self._model,
                    self._forward.states(part),
                    part,
                    loss,
                    self._temperature,
                    entropy=self._entropy,
                    per_token=per_token,
                    mixed=self._forward.mixed,
                )
                total += value
                for name, metric in metrics.items():
                    sums[name] = sums.get(name, 0) + metric
        return total.item()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy, on its device, not copied; of tied weights, the first name.

        Weights with an adapter are copied, with the adapter added, as they are asked for.
        """
        return published(self._model)

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference.

        Raises:
            GroupwiseError: the policy is adapted, so that its base is the reference.
        """
        reference = self._reference.to_move().model
        with torch.no_grad():
            policy = self._model.state_dict()
            for name, tensor in reference.state_dict().items():
                tensor.copy_(policy[name])

    def snapshot(self) -> Snapshot:
        """What is trained, the optimizer's state and, if it has moved, the reference; as they are now."""
        name, weights = self._trained()
        files = {name: copied(weights)}
        if self._reference.moved:
            files[REFERENCE] = copied(published(self._reference.own().model))
        return all_of(*starmap(weights_file, files.items()), self._steps.snapshot())

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote; the optimizer's settings stay those given here.

        Raises:
            CheckpointError: a file is missing, or is not that of this model.
        """
        name, weights = self._trained()
        restore_weights(weights, path / name)
        self._reference.moved = (path / REFERENCE).is_file()
        if self._reference.moved:
            restore_weights(published(self._reference.own().model), path / REFERENCE)
        self._steps.restore(path)

    def _trained(self) -> tuple[str, Iterator[tuple[str, Tensor]]]:
        """The file of the tensors that training changes, and those."""
        if self._adapted:
            return "adapter.safetensors", trained(self._model)
        return "model.safetensors", self.weights()
