"""Messages to tokens and tokens to text, for one tokenizer.

A prompt is either raw text that the model continues, or chat messages that the tokenizer's template lays out up to
the place where the assistant speaks.  A completion is read back without the tokens that only steer a conversation.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from groupwise.errors import ModelError
from groupwise.records import Ints, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    name: str = "model"
    """Whose tokenizer it is, for messages: the policy's, or a path."""

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
            text = self._open(prompt)
            tokens = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        if longest is None or len(tokens) <= longest:
            return tokens
        beginning = tokens[:1][: int(tokens[0] == self.tokenizer.bos_token_id)]
        return np.concatenate([beginning, tokens[len(tokens) - longest + len(beginning) :]])

    def opening(self, prompt: Prompt) -> str:
        """What a model that reads along has read when the assistant begins to speak; see `conversation`."""
        return plain_text(prompt) if self.tokenizer.chat_template is None else self._open(as_messages(prompt))

    def conversation(self, prompt: Prompt, said: str) -> Ints:
        """int32[N]: a prompt and what the assistant said to it, finished, as a reward model reads them.

        The chat template lays them out, and a prompt that is text is the user's message.  A tokenizer without a
        template reads the contents one after the other, as text.

        Raises:
            ModelError: the template refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            return np.asarray(self.tokenizer(plain_text(prompt) + said)["input_ids"], dtype=np.int32)
        messages = as_messages(prompt)
        if messages[-1]["role"] == "assistant":  # the policy was asked to go on with it
            messages, said = messages[:-1], f"{messages[-1]['content']}{said}"
        text = self._lay_out([*messages, {"role": "assistant", "content": said}])
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

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

    def token_at(self, rollout: Rollout, end: int) -> int:
        """The index of the token that says the last of the first `end` characters of a rollout's text.

        Exact for any tokenizer: of a token that says characters on both sides of `end` it is the index, and of several
        tokens that make one character the last.  The end of the text is the last token, which may say nothing.
        """
        places = np.flatnonzero(rollout.loss_mask)
        if end >= len(rollout.text):
            return int(places[-1])
        tokens = rollout.tokens[places]

        def said(count: int) -> int:
            # Up to three tokens may be the beginning of a character, and are decoded as something else until it ends.
            parts = (self.text(tokens[:whole]) for whole in range(count, max(count - 4, -1), -1))
            return next((len(part) for part in parts if rollout.text.startswith(part)), 0)

        return int(places[bisect_left(range(1, len(tokens)), end, key=said)])

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

    def _open(self, messages: Sequence[Message]) -> str:
        unfinished = messages[-1]["role"] == "assistant"
        return self._lay_out(messages, generation=not unfinished, unfinished=unfinished)

    def _lay_out(self, messages: Sequence[Message], generation: bool = False, unfinished: bool = False) -> str:
        if self.tokenizer.chat_template is None:
            raise ModelError(
                f"{self.name}: its tokenizer has no chat template, so a prompt cannot be a list of messages; accepted: "
                "prompts that are strings, or a tokenizer with a template (add chat_template.jinja to the model folder)"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation,
                continue_final_message=unfinished,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(
                f"{self.name}: its chat template refuses messages with the roles {roles}: {error}; "
                "change the roles in the data, or the template (chat_template.jinja in the model folder)"
            ) from error
        assert isinstance(text, str)
        return text

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Special tokens that only steer a conversation, by what they are written as.

        Some tokenizers declare `<think>` and `</think>` special.  They carry meaning that rewards read, unlike
        `<|im_end|>` or `<s>`: a special token stays when its opening or closing partner is special, too, and
        neither has an office such as beginning or padding.
        """
        special = {token.content: id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        offices = set(self.tokenizer.special_tokens_map.values())
        kept = {token for token in special.keys() - offices if _partner(token) in special.keys() - offices}
        return {token: special[token] for token in special if token not in kept}

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Ids that never reach the text."""
        return frozenset(self.control_tokens.values()) | frozenset(self.stop_ids)


def as_messages(prompt: Prompt) -> list[Message]:
    """The messages of a prompt; text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def plain_text(prompt: Prompt) -> str:
    """A prompt for a reader without a chat template: text as it is, or a line for each message."""
    return prompt if isinstance(prompt, str) else "".join(f"{message['content']}\n" for message in prompt)


def _partner(token: str) -> str | None:
    tag = _TAG.fullmatch(token)
    return None if tag is None else f"<{'' if tag[1] else '/'}{tag[2]}>"
