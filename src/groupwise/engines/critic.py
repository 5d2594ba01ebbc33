"""PPO's critic: a second transformers decoder with a value head, and its own optimizer; here, inside this process.

Shapes: B rows, T tokens, D hidden size.  The value at a token is the critic's estimate before that token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.engines import Optimizer, Snapshot, ValueLossFn
from groupwise.engines.steps import Steps, all_of, copied, distinct, restore_weights, weights_file
from groupwise.head import at_tokens
from groupwise.packing import Forward
from groupwise.records import Batch


class LocalCritic:
    """Estimates the return from each token on.  See `groupwise.engines.Critic`."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        microbatch_tokens: int,
        total_updates: int,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            model: a model of its own, whose language-model head gives way to a value head.
            optimizer: AdamW and its schedule.
            microbatch_tokens: most tokens, padding included, in one forward pass.
            total_updates: optimizer steps over which the schedule falls to 0.
            mixed: take the decoder's products in bfloat16.
        """
        self._model, self._microbatch_tokens = model, microbatch_tokens
        self._head = put_value_head(model)
        self._forward = Forward(model, mixed)
        self._values = partial(estimates, self._forward)
        decoder = cast(Any, model).get_decoder()
        self._steps = Steps(chain(decoder.parameters(), self._head.parameters()), optimizer, total_updates)

    def values(self, batch: Batch) -> Tensor:
        """See `Critic.values`."""
        return self._forward.for_each_token(batch, self._microbatch_tokens, self._values)

    def update(self, batch: Batch, loss: ValueLossFn) -> dict[str, float]:
        """See `Critic.update`.

        Raises:
            NumericalError: loss or gradient is not finite; nothing was changed.
        """

        def accumulate() -> float:
            with self._forward.microbatches(batch, self._microbatch_tokens) as parts:
                return learn_values(((part, loss) for _, part in parts), self._values)

        return as_metrics(self._steps.take(accumulate))

    def snapshot(self) -> Snapshot:
        """The weights and the optimizer's state, as they are now."""
        return all_of(weights_file("critic.safetensors", copied(self._weights())), self._steps.snapshot())

    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote.

        Raises:
            CheckpointError: a file is missing, or is not that of this critic.
        """
        restore_weights(self._weights(), path / "critic.safetensors")
        self._steps.restore(path)

    def _weights(self) -> list[tuple[str, Tensor]]:
        head = {f"value_head.{name}": tensor for name, tensor in self._head.state_dict().items()}
        return list(distinct({**cast(Any, self._model).get_decoder().state_dict(), **head}))


# Any critic, wherever its weights are --------------------------------------------------------------------------------


def put_value_head(model: PreTrainedModel) -> nn.Linear:
    """Replace the language-model head by one that says a single number: 0, until it is trained."""
    embedding = cast(Any, model.get_input_embeddings()).weight
    size = model.config.get_text_config().hidden_size
    head = nn.Linear(size, 1, device=embedding.device, dtype=embedding.dtype)
    # From zero, the first advantages are those of no critic at all instead of noise.
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    return head


def estimates(forward: Forward, part: Batch) -> Tensor:
    """float[B, T]: the values of a model with a value head; 0 where `loss_mask` is False.  At least float32."""
    head = cast(nn.Linear, forward.model.get_output_embeddings())
    values = head(forward.states(part)).squeeze(-1)
    return at_tokens(part.loss_mask, values.to(torch.promote_types(values.dtype, torch.float32)))


def learn_values(parts: Iterable[tuple[Batch, ValueLossFn]], values: Callable[[Batch], Tensor]) -> float:
    """The sum of each part's loss; its gradient is added to that of the parameters."""
    total = 0.0
    for part, loss in parts:
        value = loss(values(part), part)
        value.backward()
        total += value.item()
    return total


def as_metrics(taken: dict[str, float]) -> dict[str, float]:
    """What an optimizer step says, under the names of a critic's metrics."""
    return {f"critic/{name}": value for name, value in taken.items()}
