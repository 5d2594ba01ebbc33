"""Messages to tokens and tokens to text, for one tokenizer.

A prompt is either raw text that the model continues, or chat messages that the tokenizer's template lays out up to
the place where the assistant speaks.  A completion is read back without the tokens that only steer a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from groupwise.errors import ModelError
from groupwise.records import Ints, Rollout

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
"""Text to continue, or messages `{"role": ..., "content": ...}`."""

_TAG = re.compile(r"<(/?)(\w+)>")


@dataclass(frozen=True)
class Chat:
    """One tokenizer, and the tokens that end a completion."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """A completion ends with the first of these."""

    def prompt(self, prompt: Prompt, longest: int | None = None) -> Ints:
        """int32[P]: the tokens of a prompt, ready to be continued by the model.

        Of more than `longest` tokens the last ones are kept, behind the tokenizer's BOS if that is how they began.

        Text is continued as it is, with the tokenizer's own beginning (BOS) if it has one.  Messages go through the
        chat template and end where the assistant begins to speak; a last message of the assistant is continued.

        Raises:
            ModelError: messages, and the tokenizer has no chat template or its template refuses them.
        """
        if isinstance(prompt, str):
            tokens = np.asarray(self.tokenizer(prompt)["input_ids"], dtype=np.int32)
        else:  # the template writes the special tokens itself
            text = self._lay_out(prompt)
            tokens = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        if longest is None or len(tokens) <= longest:
            return tokens
        beginning = tokens[:1][: int(tokens[0] == self.tokenizer.bos_token_id)]
        return np.concatenate([beginning, tokens[len(tokens) - longest + len(beginning) :]])

    def text(self, tokens: Ints) -> str:
        """What a completion int32[R] says: without stop tokens and special tokens, but with tags like `<think>`."""
        said = [token for token in tokens.tolist() if token not in self._silent]
        text = self.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def prompt_text(self, rollout: Rollout) -> str:
        """The prompt of a rollout as the model saw it, special tokens and all."""
        text = self.tokenizer.decode(rollout.tokens[~rollout.loss_mask].tolist(), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _lay_out(self, messages: Sequence[Message]) -> str:
        if self.tokenizer.chat_template is None:
            raise ModelError(
                "model: its tokenizer has no chat template, so a prompt cannot be a list of messages; accepted: "
                "prompts that are strings, or a tokenizer with a template (add chat_template.jinja to the model folder)"
            )
        unfinished = messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not unfinished,
                continue_final_message=unfinished,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(
                f"model: its chat template refuses messages with the roles {roles}: {error}; "
                "change the roles in the data, or the template (chat_template.jinja in the model folder)"
            ) from error
        assert isinstance(text, str)
        return text

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Ids that never reach the text.

        Some tokenizers declare `<think>` and `</think>` special.  They carry meaning that rewards read, unlike
        `<|im_end|>` or `<s>`: a special token stays when its opening or closing partner is special, too, and
        neither has an office such as beginning or padding.
        """
        special = {token.content: id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        offices = set(self.tokenizer.special_tokens_map.values())
        kept = {token for token in special.keys() - offices if _partner(token) in special.keys() - offices}
        return frozenset(special[token] for token in special.keys() - kept) | frozenset(self.stop_ids)


def _partner(token: str) -> str | None:
    tag = _TAG.fullmatch(token)
    return None if tag is None else f"<{'' if tag[1] else '/'}{tag[2]}>"
