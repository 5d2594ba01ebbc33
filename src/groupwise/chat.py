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

MOST_TOKENS_OF_A_CHARACTER = 4
"""A character has at most four bytes in UTF-8, and a token at least one."""

_TAG = re.compile(r"<(/?)(\w+)>")


@dataclass(frozen=True)
class Chat:
    """One tokenizer, and the tokens that end a completion."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """A completion ends with the first of these."""

    def prompt(self, prompt: Prompt) -> Ints:
        """int32[P]: the tokens of a prompt, ready to be continued by the model.

        Text is continued as it is, with the tokenizer's own beginning (BOS) if it has one.  Messages go through the
        chat template and end where the assistant begins to speak; a last message of the assistant is continued.

        Raises:
            ModelError: messages, and the tokenizer has no chat template or its template refuses them.
        """
        if isinstance(prompt, str):
            return np.asarray(self.tokenizer(prompt)["input_ids"], dtype=np.int32)
        # The template writes the special tokens itself.
        return np.asarray(self.tokenizer(self._lay_out(prompt), add_special_tokens=False)["input_ids"], dtype=np.int32)

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

    def pieces(self, tokens: Ints) -> list[str]:
        """The text of each token, special ones too; a character that is spread over tokens stands with its last."""
        found: list[str] = []
        held: list[int] = []
        for token in tokens.tolist():
            held.append(token)
            text = self._piece(tuple(held))
            whole = not text.endswith("\ufffd") or len(held) == MOST_TOKENS_OF_A_CHARACTER
            found.append(text if whole else "")
            held = [] if whole else held
        return found

    def _piece(self, tokens: tuple[int, ...]) -> str:
        """What tokens say after something else: alone, some would lose the space before them."""
        if tokens not in self._pieces:
            before, text = (self.tokenizer.decode([*self._anchor, *more]) for more in ((), tokens))
            assert isinstance(before, str) and isinstance(text, str)
            self._pieces[tokens] = text[len(before) :]
        return self._pieces[tokens]

    @cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer("a", add_special_tokens=False)["input_ids"][:1]

    @cached_property
    def _pieces(self) -> dict[tuple[int, ...], str]:
        return {}

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
