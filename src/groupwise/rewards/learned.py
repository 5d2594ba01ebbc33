"""What rewards that hold a model share: its settings, loading it, and batches whose padding changes nothing.

Workers of other rewards import this file for its settings, so torch is imported where it is used.

Shapes: B rows, T tokens of the longest row.  Rows are right-padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from groupwise.chat import Chat
from groupwise.errors import RewardError
from groupwise.records import Ints, Rollout
from groupwise.rewards.calls import Verdict
from groupwise.slots import Slot

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Judge = Callable[[Sequence[int], "Tensor", "Tensor"], Sequence[Verdict]]
"""(which rows, their tokens int64[B, T], mask bool[B, T]) -> a verdict on each of them."""


class Learned(Slot):
    """The settings of a reward that holds a model."""

    in_process: ClassVar[bool] = True
    model: str
    """Folder or hub id of the reward model; its own tokenizer and chat template lay out what it reads."""
    device: str = "auto"
    """Where it runs; `auto` takes the first CUDA GPU if there is one, else the CPU."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of its weights and activations."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Tokens, padding included, that it reads at once; lower it when memory runs out.  The result does not change."""

    def load(self, kind: str) -> Reader:
        """The model with the head that the transformers class of that name gives it, and its tokenizer.

        Raises:
            ConfigError: there is no such device.
            ModelError: model or tokenizer cannot be loaded, or do not fit together.
        """
        import torch
        import transformers

        from groupwise.devices import find_device
        from groupwise.model import check_tokenizer, load_model, load_tokenizer

        device = find_device(self.device, f"device of the reward model {self.model}")
        model = load_model(
            self.model, dtype=getattr(torch, self.dtype), device=device, kind=getattr(transformers, kind)
        )
        tokenizer = load_tokenizer(self.model)
        check_tokenizer(model, tokenizer)
        padding = model.config.get_text_config().pad_token_id
        return Reader(self.model, model.requires_grad_(False), Chat(tokenizer, (), self.model), padding)


@dataclass(frozen=True)
class Reader:
    """A model that reads what others wrote, and the tokenizer that writes it down for the model."""

    name: str
    model: PreTrainedModel
    chat: Chat
    padding: int | None
    """The token that the model itself takes for padding."""

    @property
    def context(self) -> float:
        """Most tokens that it can read; inf when nothing says."""
        from groupwise.model import context_length

        return min(context_length(self.model) or math.inf, self.chat.tokenizer.model_max_length)

    @property
    def writes_beginning(self) -> bool:
        """Whether the tokenizer adds the special tokens of a text; a chat template writes them itself."""
        return self.chat.tokenizer.chat_template is None

    def begin(self, opening: str) -> list[int]:
        """The tokens of what stands before the completion."""
        return list(self.chat.tokenizer(opening, add_special_tokens=self.writes_beginning)["input_ids"])

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text alone, nothing added."""
        return list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    def check_length(self, row: int, tokens: int) -> None:
        """Refuse a prompt that leaves no room for an answer.

        Raises:
            RewardError: the prompt of this row is too long.
        """
        if tokens >= self.context:
            raise RewardError(
                f"{self.name}: reads {self.context:.0f} tokens, and the prompt of rows[{row}] alone has {tokens} of "
                "them; take a reward model with a longer context, or leave out rows that are so long"
            )

    def refusal(self, rollout: Rollout, tokens: int) -> str:
        """Why a rollout whose prompt and completion are so many tokens cannot be judged; empty when it can.

        A completion that spells a control token could end its own turn and praise itself in the next.  One that is too
        long is never cut: the score of a beginning is not the score of the whole.
        """
        spelled = next((token for token in self.chat.control_tokens if token in rollout.text), None)
        if spelled is not None:
            return f"the completion spells {spelled}, a control token of {self.name}"
        if tokens > self.context:
            return f"prompt and completion are {tokens} tokens, and {self.name} reads {self.context:.0f}"
        return ""

    def judge(
        self, rollouts: Sequence[Rollout], rows: Sequence[Ints], batch_tokens: int, judge: Judge
    ) -> list[Verdict]:
        """A verdict on each rollout, laid out as a row of tokens: that of `judge`, or why there is none."""
        import torch

        refusals = [self.refusal(rollout, len(row)) for rollout, row in zip(rollouts, rows, strict=True)]
        found = [Verdict(math.nan, refusal) for refusal in refusals]
        readable = [index for index, refusal in enumerate(refusals) if not refusal]
        for part in _alike(readable, rows, batch_tokens):
            with torch.inference_mode():
                verdicts = judge(part, *self._padded([rows[index] for index in part]))
            for index, verdict in zip(part, verdicts, strict=True):
                found[index] = self._checked(verdict)
        return found

    def _padded(self, rows: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        """Tokens int64[B, T] and mask bool[B, T].

        A model that reads its verdict off the last token finds it by its padding token.  One without such a token
        takes the last there is, so here it gets one that no row has: a row that ends with it would be misread.
        """
        import torch

        taken = np.unique(np.concatenate(rows))
        padding = self.padding if self.padding is not None else int(np.setdiff1d(np.arange(len(taken) + 1), taken)[0])
        self.model.config.get_text_config().pad_token_id = padding
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.full(mask.shape, padding)
        tokens[mask] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
        return tokens.to(self.model.device), mask.to(self.model.device)

    def _checked(self, verdict: Verdict) -> Verdict:
        given = (verdict.value, *(reward for _, reward in verdict.steps))
        bad = next((value for value in given if not math.isfinite(value)), None)
        return verdict if bad is None else Verdict(math.nan, f"{self.name} said {bad}")


def _alike(indices: Sequence[int], rows: Sequence[Ints], batch_tokens: int) -> Iterator[list[int]]:
    """The indices in parts of rows of like length, the longest first, of at most `batch_tokens` with their padding.

    A row longer than that is a part of its own.
    """
    order = sorted(indices, key=lambda index: len(rows[index]), reverse=True)
    while order:
        count = max(batch_tokens // len(rows[order[0]]), 1)
        yield order[:count]
        order = order[count:]
