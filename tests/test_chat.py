"""Messages become the tokens that the template says, and completions become text that rewards can read."""

from __future__ import annotations

import numpy as np
import pytest
from models import tiny_tokenizer
from texts import byte_tokenizer

from groupwise.chat import Chat
from groupwise.errors import ModelError
from groupwise.records import Ints

QUESTION = [{"role": "user", "content": "2+2?"}]


def chat(**kwargs: object) -> Chat:
    tokenizer = byte_tokenizer(**kwargs)  # type: ignore[arg-type]
    return Chat(tokenizer, (tokenizer.eos_token_id,))


def tokens(chat: Chat, text: str) -> Ints:
    return np.asarray(chat.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def test_messages_are_laid_out_up_to_where_the_assistant_speaks() -> None:
    c = chat(bos=True)
    prompt = c.prompt(QUESTION)
    assert prompt.dtype == np.int32
    assert c.tokenizer.decode(prompt) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_text_is_continued_as_it_is_after_the_tokenizers_own_beginning() -> None:
    assert chat(bos=True).tokenizer.decode(chat(bos=True).prompt("2+2=")) == "<s>2+2="
    assert chat().prompt("").dtype == np.int32


def test_a_last_message_of_the_assistant_is_continued() -> None:
    c = chat()
    prompt = c.prompt([*QUESTION, {"role": "assistant", "content": "It is"}])
    assert c.tokenizer.decode(prompt).endswith("<|im_start|>assistant\nIt is")


def test_messages_need_a_chat_template() -> None:
    with pytest.raises(
        ModelError, match=r"model: .* no chat template.*accepted: prompts that are strings.*chat_template\.jinja"
    ):
        chat(template=None).prompt(QUESTION)


def test_a_template_that_refuses_a_role_is_quoted() -> None:
    c = chat(template="{{ raise_exception('System role not supported') }}")
    with pytest.raises(ModelError, match=r"roles system, user: System role not supported; change the roles"):
        c.prompt([{"role": "system", "content": "Be brief."}, *QUESTION])


@pytest.mark.parametrize("declared", ["special", "added", "neither"])
def test_thinking_stays_in_the_text_however_its_tags_are_declared(declared: str) -> None:
    tags = ("<think>", "</think>")
    c = chat() if declared == "neither" else chat(**{declared: tags})
    said = tokens(c, "<think>2 and 2</think>\n4<|im_end|>")
    assert c.text(said) == "<think>2 and 2</think>\n4"


def test_control_tokens_never_reach_the_text() -> None:
    c = chat(special=["<|tool|>", "<lonely>", "</s>"])
    assert c.text(tokens(c, "a<|tool|>b<lonely>c<s>d</s>e<|endoftext|><|im_end|>")) == "abcde"


def test_an_ordinary_token_that_stops_is_not_text() -> None:
    tokenizer = byte_tokenizer()
    c = Chat(tokenizer, (tokenizer.eos_token_id, tokens(chat(), ";")[0].item()))
    assert c.text(tokens(c, "4;")) == "4"


def test_an_empty_completion_is_empty_text() -> None:
    assert chat().text(np.zeros(0, dtype=np.int32)) == ""


def test_spaces_before_punctuation_are_the_models_own() -> None:
    c = chat()
    assert c.text(tokens(c, "a , b . it 's")) == "a , b . it 's"


@pytest.mark.parametrize("text", ["2 + 2 is 4.", "\u00e9t\u00e9 \U0001f600 \u2212 1", "<|im_start|>user\nso<|im_end|>"])
def test_the_pieces_of_tokens_are_their_text(text: str) -> None:
    c = chat()
    sampled = tokens(c, text)
    pieces = c.pieces(sampled)
    assert len(pieces) == len(sampled)
    assert "".join(pieces) == text
    assert c.pieces(tokens(c, "\U0001f600")) == ["", "", "", "\U0001f600"]  # four bytes, four tokens


def test_a_piece_keeps_the_space_that_a_tokenizer_drops_at_the_beginning() -> None:
    c = Chat(tiny_tokenizer(), stop_ids=(1,))
    assert c.pieces(np.array([5, 6], dtype=np.int32)) == [" w5", " w6"]


def test_bytes_that_are_no_text_are_shown_as_such_and_hold_nothing_back() -> None:
    c = chat()
    broken = tokens(c, "\u00e9")[:1]
    assert "".join(c.pieces(np.concatenate([broken, tokens(c, "ab")]))) == "\ufffdab"
