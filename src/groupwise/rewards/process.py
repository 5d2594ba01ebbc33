"""Process reward models: how likely each step of a completion is a good one, for supervision of the process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, cast

import numpy as np
from pydantic import Field

from groupwise.chat import Prompt
from groupwise.errors import ModelError
from groupwise.records import Ints, Rollout
from groupwise.rewards.calls import Verdict
from groupwise.rewards.learned import Learned, Reader
from groupwise.rewards.steps import split_steps
from groupwise.slots import OneOf, Slot

if TYPE_CHECKING:
    from torch import Tensor

LaidOut = tuple[Ints, list[int]]
"""(tokens int32[T] of opening and steps, the place among them where the model says what it thinks of each step)"""
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "last": lambda values: values[-1],
    "product": math.prod,
}


class Head(Protocol):
    """How a model is shown the steps, and how its opinion of each is read."""

    kind: ClassVar[str]
    """The transformers class that loads such a model."""

    def check(self, reader: Reader) -> None:
        """Refuse a model that cannot be read this way.

        Raises:
            ModelError: why not.
        """
        ...

    def lay_out(self, reader: Reader, opening: str, steps: Sequence[str]) -> LaidOut:
        """The steps after the opening, as the model was trained to see them."""
        ...

    def read(self, reader: Reader, tokens: Tensor, mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """float[N]: how likely a good step ends at each (row, place), int64[N] each, of tokens and mask [B, T]."""
        ...


class TokenClassifier(Slot):
    r"""A label for each token (`AutoModelForTokenClassification`), read at the last token of a mark after each step.

    Opening, steps and marks are tokenised one by one, as TRL's `PRMTrainer` does in training.
    """

    type: Literal["token_classifier"] = "token_classifier"
    kind: ClassVar[str] = "AutoModelForTokenClassification"
    mark: str = Field(default="\n", min_length=1)
    """What follows each step and carries its label."""
    good: int = Field(default=1, ge=0)
    """The label of a good step."""

    def check(self, reader: Reader) -> None:
        """See `Head.check`."""
        labels = cast(Any, reader.model.config).num_labels
        if labels <= max(self.good, 1):
            raise ModelError(
                f"{reader.name}: has {labels} labels; accepted: at least two, of which number {self.good} (head.good) "
                "is that of a good step"
            )
        _require_mark(reader, self.mark)

    def lay_out(self, reader: Reader, opening: str, steps: Sequence[str]) -> LaidOut:
        """See `Head.lay_out`."""
        tokens, mark, places = reader.begin(opening), reader.tokens(self.mark), list[int]()
        for step in steps:
            tokens += [*reader.tokens(step), *mark]
            places.append(len(tokens) - 1)
        return np.asarray(tokens, dtype=np.int32), places

    def read(self, reader: Reader, tokens: Tensor, mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """See `Head.read`."""
        import torch

        found = cast(Any, reader.model)(input_ids=tokens, attention_mask=mask.long()).logits[rows, places]
        return found.to(torch.promote_types(found.dtype, torch.float32)).softmax(-1)[:, self.good]


class NextToken(Slot):
    """A causal language model that continues each mark with one token for a good step and another for a bad one.

    Math-Shepherd's way (arXiv:2312.08935), with its mark and its tokens as defaults.  The text is tokenised as a whole.
    """

    type: Literal["next_token"] = "next_token"
    kind: ClassVar[str] = "AutoModelForCausalLM"
    mark: str = Field(default=" ки", min_length=1)
    """What follows each step; the model answers after its last token."""
    between: str = "\n"
    """What stands between a mark and the next step."""
    good: str = "+"
    """The token for a good step; its probability is taken against that of `bad`."""
    bad: str = "-"
    """The token for a bad step."""

    def check(self, reader: Reader) -> None:
        """See `Head.check`."""
        from groupwise.model import check_head

        check_head(reader.model)
        _require_mark(reader, self.mark)
        if not reader.chat.tokenizer.is_fast:
            raise ModelError(
                f"{reader.name}: its tokenizer does not say which characters a token stands for; save a fast one"
            )
        for name, word in (("good", self.good), ("bad", self.bad)):
            if len(reader.tokens(word)) != 1:
                raise ModelError(
                    f"{reader.name}: head.{name} {word!r} is {len(reader.tokens(word))} tokens; accepted: one token of "
                    "its tokenizer"
                )

    def lay_out(self, reader: Reader, opening: str, steps: Sequence[str]) -> LaidOut:
        """See `Head.lay_out`."""
        text, ends = opening, list[int]()
        for number, step in enumerate(steps):
            text += f"{self.between if number else ''}{step}{self.mark}"
            ends.append(len(text))
        written = reader.chat.tokenizer(text, add_special_tokens=reader.writes_beginning, return_offsets_mapping=True)
        spans = [(token, begin) for token, (begin, end) in enumerate(written["offset_mapping"]) if begin < end]
        places = [max(token for token, begin in spans if begin < end) for end in ends]
        return np.asarray(written["input_ids"], dtype=np.int32), places

    def read(self, reader: Reader, tokens: Tensor, mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """See `Head.read`."""
        from groupwise.model import hidden_states, logits

        words = [*reader.tokens(self.good), *reader.tokens(self.bad)]
        return logits(reader.model, hidden_states(reader.model, tokens)[rows, places])[:, words].softmax(-1)[:, 0]


def _require_mark(reader: Reader, mark: str) -> None:
    if not reader.tokens(mark):
        raise ModelError(f"{reader.name}: head.mark {mark!r} has no token in its tokenizer; name a mark that has one")


class ProcessRewardModel(Learned):
    r"""How likely each step of the completion is a good one, as a model of such steps says.

    With `supervision: process` (`algorithm: grpo_process`) the steps are rewarded where they end.  The reward of the
    completion is made of them by `reduction`.  What a reward model refuses is refused here, too.
    """

    type: Literal["process_reward_model"] = "process_reward_model"
    gives_steps: ClassVar[bool] = True
    head: Annotated[Head, OneOf(TokenClassifier, NextToken)] = TokenClassifier()
    """How the model is shown the steps, and how its opinion of each is read."""
    separator: str = Field(default="\n\n", min_length=1)
    """What ends a step in a completion."""
    reduction: Literal["min", "mean", "last", "product"] = "min"
    """The reward of the completion, from those of its steps."""

    def prepare(self, prompts: Mapping[int, Prompt]) -> None:
        """See `Together.prepare`.

        Raises:
            ModelError: the model cannot be loaded, or cannot be read by this head.
            RewardError: a prompt is too long for it.
        """
        for place, prompt in prompts.items():
            self._reader.check_length(place, len(self._reader.begin(self._reader.chat.opening(prompt))))

    def __call__(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Verdict]:
        import torch

        reader = self._reader
        steps = [split_steps(rollout.text, self.separator) for rollout in rollouts]
        laid_out = [
            self.head.lay_out(reader, reader.chat.opening(prompt), [said for _, said in parts])
            for prompt, parts in zip(prompts, steps, strict=True)
        ]

        def judge(part: Sequence[int], tokens: Tensor, mask: Tensor) -> list[Verdict]:
            counts = [len(steps[index]) for index in part]
            rows = torch.arange(len(part)).repeat_interleave(torch.tensor(counts))
            places = torch.tensor([place for index in part for place in laid_out[index][1]])
            found = self.head.read(reader, tokens, mask, rows.to(tokens.device), places.to(tokens.device))
            return [
                self._verdict([end for end, _ in steps[index]], said.tolist())
                for index, said in zip(part, found.split(counts), strict=True)
            ]

        return reader.judge(rollouts, [tokens for tokens, _ in laid_out], self.batch_tokens, judge)

    def _verdict(self, ends: Sequence[int], said: Sequence[float]) -> Verdict:
        return Verdict(REDUCTIONS[self.reduction](said), steps=tuple(zip(ends, said, strict=True)))

    @cached_property
    def _reader(self) -> Reader:
        reader = self.load(self.head.kind)
        self.head.check(reader)
        return reader
