"""The quickstart's task, tokenizer and base model: what it promises before any reinforcement learning."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import arithmetic
from groupwise.arithmetic import Recipe, build_base_model, build_tokenizer, problems
from groupwise.errors import ModelError

TINY = Recipe(layers=1, hidden=32, intermediate=32, heads=2, steps=2, batch=4)
ASCII = "".join(map(chr, range(32, 127)))


def asked(rows: list[dict[str, object]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def numbers(question: str) -> frozenset[str]:
    return frozenset(re.findall(r"\d+", question))


def test_splits_share_no_problem_on_any_pair_of_seeds() -> None:
    seen = {
        split: {numbers(text) for seed in (0, 1) for text in asked(problems(seed, split, 1500))}
        for split in ("warmup", "train", "test")
    }
    assert not seen["warmup"] & seen["train"]
    assert not seen["warmup"] & seen["test"]
    assert not seen["train"] & seen["test"]


def test_problems_are_distinct_and_a_function_of_the_seed() -> None:
    rows = problems(3, "train", 400)
    assert rows == problems(3, "train", 400)
    assert rows[:50] == problems(3, "train", 50)
    assert len(set(asked(rows))) == 400
    assert len(set(asked(rows)) & set(asked(problems(4, "train", 400)))) < 20
    # Pinned: another machine and another release ask the same questions.
    assert asked(problems(0, "test", 2)) == ["What is 397 + 110?", "What is 291 + 556?"]


def test_rows_carry_the_right_answer() -> None:
    for row in problems(0, "test", 100):
        assert row["prompt"][0]["role"] == "user"
        a, b = re.findall(r"\d+", row["prompt"][0]["content"])
        assert row["answer"] == str(int(a) + int(b))


@pytest.mark.parametrize("pair", [(100, 100), (478, 356), (999, 999), (901, 109), (555, 445)])
def test_every_step_of_a_worked_solution_is_right(pair: tuple[int, int]) -> None:
    a, b = pair
    careful = arithmetic.careful_solution(a, b)
    for left, right in re.findall(r"([\d+]+)=(\d+)", careful):
        assert sum(map(int, left.split("+"))) == int(right)
    for solution in (careful, arithmetic.hasty_solution(a, b)):
        assert re.fullmatch(r"<think>.+</think>\\boxed\{" + str(a + b) + r"\}", solution, re.DOTALL)
    assert arithmetic.blunt_solution(a, b) == f"It is {a + b}."


def test_a_careful_solution_reads_like_column_addition() -> None:
    assert arithmetic.careful_solution(478, 356) == (
        "<think>ones: 8+6=14 so 4\ntens: 7+5+1=13 so 34\nhundreds: 4+3+1=8 so 834</think>\\boxed{834}"
    )


def test_math_verify_reads_the_answer() -> None:
    from math_verify import parse, verify

    solution = arithmetic.careful_solution(478, 956)
    assert verify(parse("$1434$"), parse(solution))
    assert not verify(parse("$1435$"), parse(solution))


@pytest.mark.parametrize("text", [ASCII, ASCII[::-1], "  two  spaces\n\ttab \n", "äß漢🙂", "What is 12 +34 ?", ""])
def test_tokenizer_round_trips(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_is_frugal() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer("90125")["input_ids"]) == 5, "a digit is a token"
    for place in range(100, 1000, 37):
        solution = arithmetic.careful_solution(place, 1099 - place)
        assert len(tokenizer(solution)["input_ids"]) < 48
    kept = tokenizer.decode(tokenizer("<think>That</think>It<|im_end|>")["input_ids"], skip_special_tokens=True)
    assert kept == "<think>That</think>It", "the thinking is text, the stop token is not"


def test_model_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = build_base_model(
        tmp_path / "runs" / "base", 0, lambda step, steps, loss: calls.append((step, steps)), TINY
    )
    assert calls == [(1, 2), (2, 2)]
    assert list(folder.parent.iterdir()) == [folder], "no scratch folder stays behind"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Add."}, *problems(0, "test", 1)[0]["prompt"]],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is 397 + 110?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer(ASCII)["input_ids"]) == ASCII
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert model(tokens).logits.shape == (1, tokens.shape[1], model.config.vocab_size)


def test_only_the_solution_is_trained() -> None:
    tokenizer = build_tokenizer()
    (row,) = arithmetic._encode(tokenizer, [("What is 1 + 2?", "It is 3.")])
    assert tokenizer.decode(row.tokens[: row.prompt]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(row.tokens[row.prompt :]) == "It is 3.<|im_end|>"


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_model_is_a_function_of_the_seed_and_of_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = weights(build_base_model(tmp_path / "a", 0, recipe=TINY))
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is left alone"
    torch.manual_seed(2)
    assert weights(build_base_model(tmp_path / "b", 0, recipe=TINY)) == first
    assert weights(build_base_model(tmp_path / "c", 1, recipe=TINY)) != first


def test_a_finished_folder_is_used_again_and_a_stale_one_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def build(seed: int = 0, recipe: Recipe = TINY) -> int:
        """The number of warm-up steps it took."""
        steps.clear()
        build_base_model(tmp_path / "base", seed, lambda step, total, loss: steps.append(step), recipe)
        assert json.loads((tmp_path / "base" / arithmetic.RECORD).read_text(encoding="utf-8"))["seed"] == seed
        return len(steps)

    assert build() == 2
    assert build() == 0
    assert build(seed=1) == 2
    assert build(seed=1, recipe=dataclasses.replace(TINY, steps=3)) == 3
    assert build() == 2
    monkeypatch.setattr(arithmetic, "hasty_solution", lambda a, b: f"{a + b}")
    assert build() == 2, "the code that writes the corpus has changed"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ModelError, match="no quickstart model"):
        build_base_model(tmp_path, 0, recipe=TINY)
    assert (tmp_path / "thesis.tex").exists()


def test_an_interrupted_build_leaves_no_folder(tmp_path: Path) -> None:
    def interrupt(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_base_model(tmp_path / "base", 0, interrupt, TINY)
    assert not list(tmp_path.iterdir())
