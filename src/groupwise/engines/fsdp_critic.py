"""PPO's critic split over the ranks: values, gradients and optimizer as those of the policy beside it.

Shapes: B rows, T tokens of the longest.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.engines import Optimizer, ValueLossFn
from groupwise.engines.critic import as_metrics, estimates, learn_values, put_value_head
from groupwise.engines.ranks import Ranks, everywhere
from groupwise.engines.shard_files import Snapshots, State, read_state, resume, training_state
from groupwise.engines.shards import Sharded
from groupwise.engines.steps import Steps
from groupwise.packing import Forward
from groupwise.records import Batch


class FsdpCritic(Snapshots):
    """Estimates the return from each token on, with a model that is split.  See `groupwise.engines.Critic`.

    Values, gradients and weights are those of `LocalCritic`, up to the order in which the ranks' sums are added.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        microbatch_tokens: int,
        total_updates: int,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            ranks: this one among all.
            model: a model of its own, on every rank the same, whose language-model head gives way to a value head; it
                is not kept whole.
            optimizer: AdamW and its schedule.
            microbatch_tokens: most tokens, padding included, in one forward pass of a rank.
            total_updates: optimizer steps over which the schedule falls to 0.
            mixed: gather the layers and take their products in bfloat16; shards, gradients and all else stay float32.
        """
        self._microbatch_tokens = microbatch_tokens
        put_value_head(model)
        self._model = Sharded(Forward(model, mixed), ranks)
        self._estimates = partial(estimates, self._model.forward)
        self._steps = Steps(self._model.parameters.values(), optimizer, total_updates)
        super().__init__(ranks)

    @everywhere
    def values(self, batch: Batch) -> Tensor:
        """See `Critic.values`."""
        return self._model.for_each_token(batch, self._microbatch_tokens, self._estimates)

    @everywhere
    def update(self, batch: Batch, loss: ValueLossFn) -> dict[str, float]:
        """See `Critic.update`.

        Raises:
            NumericalError: loss or gradient is not finite, and that on every rank; nothing was changed.
        """

        def accumulate() -> float:
            with self._model.passes(batch, self._microbatch_tokens) as passes:
                parts = ((part, loss if len(rows) else _nothing) for rows, part in passes)
                mine = learn_values(parts, partial(self._model.run, self._estimates))
            return float(self.ranks.sum(torch.tensor(mine, dtype=torch.float64)))

        return as_metrics(self._steps.take(accumulate))

    @everywhere
    def restore(self, path: Path) -> None:
        """Continue from what a snapshot wrote, on however many ranks; the optimizer's settings stay those given here.

        Raises:
            CheckpointError: a file is missing or damaged, or is not that of this critic.
        """
        state = self._state()
        read_state(path, state)
        resume(self._steps, state)

    def _state(self) -> State:
        return training_state(self._model, self._steps)


def _nothing(values: Tensor, part: Batch) -> Tensor:
    """The loss of a row that keeps the others company: its gradient is 0."""
    return 0.0 * values.sum()
