"""A reward model: a classifier with one label that reads a conversation and says how good the answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from groupwise.chat import Prompt
from groupwise.errors import ModelError
from groupwise.records import Rollout
from groupwise.rewards.calls import Verdict
from groupwise.rewards.learned import Learned, Reader

if TYPE_CHECKING:
    from torch import Tensor


class RewardModel(Learned):
    """The score of a model with one label, as `AutoModelForSequenceClassification` loads it, for the conversation.

    It reads the prompt's messages and the completion as its own chat template lays them out, or as plain text when it
    has none.  The score does not depend on what else is read at the same time.  A completion that is too long for the
    model, or that spells one of its control tokens, is not valid.
    """

    type: Literal["reward_model"] = "reward_model"

    def prepare(self, prompts: Mapping[int, Prompt]) -> None:
        """See `Together.prepare`.

        Raises:
            ModelError: the model cannot be loaded, or has other than one label.
            RewardError: a prompt is too long for it.
        """
        for place, prompt in prompts.items():
            self._reader.check_length(place, len(self._reader.chat.conversation(prompt, "")))

    def __call__(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Verdict]:
        reader = self._reader
        rows = [reader.chat.conversation(p, rollout.text) for p, rollout in zip(prompts, rollouts, strict=True)]

        def judge(_: Sequence[int], tokens: Tensor, mask: Tensor) -> list[Verdict]:
            logits = cast(Any, reader.model)(input_ids=tokens, attention_mask=mask.long()).logits
            return [Verdict(score) for score in logits[:, 0].tolist()]

        return reader.judge(rollouts, rows, self.batch_tokens, judge)

    @cached_property
    def _reader(self) -> Reader:
        reader = self.load("AutoModelForSequenceClassification")
        labels = cast(Any, reader.model.config).num_labels
        if labels != 1:
            raise ModelError(
                f"{self.model}: has {labels} labels; accepted: a reward model, with one (num_labels: 1 in its "
                "config.json); a model that labels each token is a process_reward_model"
            )
        return reader
