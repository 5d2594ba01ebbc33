"""Datasets in the layouts that people have, mixtures of them, and training kept apart from evaluation."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from toys import sampled, toy_config, toy_folder, toy_rows

from groupwise.config import Config
from groupwise.data import Data, hold_out, load_task, without_held_out
from groupwise.errors import ConfigError, DataError
from groupwise.rewards import as_rewards, made_up, reference_answer, score
from groupwise.rows import read_rows
from groupwise.slots import replace
from groupwise.tasks import Task, check_prompts, normal_form
from groupwise.train import build, train

HERE = Path(__file__).parent / "data"
MATH = as_rewards("math_answer")
# A run file for each layout, as docs/tasks.md has it; test_docs reads that page, and this is what its snippets do.
PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"
LAYOUTS = {
    "openai/gsm8k:main": ("gsm8k", ["36", "1,800", "-5", "7.50", "12"]),
    "EleutherAI/hendrycks_math:algebra": ("math", [r"\frac{1}{2}", "3", r"4\pi", r"[2,\infty)", "24"]),
    "BytedTsinghua-SIA/DAPO-Math-17k": ("dapo", ["1", "56", "20", "6", "17"]),
    "Jiayi-Pan/Countdown-Tasks-3to4": ("countdown", []),
}


def on_the_page(path: str) -> dict[str, Any]:
    """The run file in docs/tasks.md that has this path."""
    blocks = PAGE.read_text().split("```yaml\n")[1:]
    trees = [yaml.safe_load(block.split("```")[0]) for block in blocks]
    return next(tree for tree in trees if tree["data"].get("path") == path)


def task_of(tree: dict[str, Any]) -> Task:
    config = Config.parse({"model": "none", **tree})
    return load_task(config.data, config.rewards)


def earned(task: Task, row: int, text: str) -> float:
    (scored,) = score([made_up(text, task.rows[row])], task.rewards, task.prompt_of)
    return scored.reward


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("hub_id", LAYOUTS)
def test_the_run_files_of_the_page_make_tasks_of_the_known_layouts(hub_id: str, suffix: str, tmp_path: Path) -> None:
    name, answers = LAYOUTS[hub_id]
    file = HERE / f"{name}.jsonl"
    if suffix == "parquet":
        file = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(read_rows(HERE / f"{name}.jsonl")), file)
    tree = on_the_page(hub_id)
    tree["data"]["path"] = str(file)
    task = task_of(tree)
    check_prompts(task)
    assert len(task.rows) == 5
    for index, row in enumerate(task.rows):
        right = reference_answer(task.rewards[0], row)
        assert right is not None
        assert earned(task, index, right) == 1
        assert earned(task, index, "\\boxed{-123456}") == 0
    for index, answer in enumerate(answers):
        assert earned(task, index, f"So it is \\boxed{{{answer}}}.") == 1


def test_gsm8k_takes_the_number_after_the_hashes() -> None:
    tree = on_the_page("openai/gsm8k:main")
    tree["data"]["path"] = str(HERE / "gsm8k.jsonl")
    task = task_of(tree)
    assert [row["answer"] for row in task.rows] == LAYOUTS["openai/gsm8k:main"][1]
    prompt = task.prompt_of(task.rows[1])
    assert normal_form(prompt).startswith("a theatre has 45 rows of 40 seats. how many seats does it have?")
    assert "####" not in normal_form(prompt)


def test_dapo_accepts_the_answer_line_that_its_prompts_ask_for() -> None:
    tree = on_the_page("BytedTsinghua-SIA/DAPO-Math-17k")
    tree["data"]["path"] = str(HERE / "dapo.jsonl")
    task = task_of(tree)
    assert [message["role"] for message in task.prompt_of(task.rows[0])] == ["user"]  # type: ignore[index]
    assert earned(task, 1, "1 + 2 + 4 + 7 + 14 + 28\nAnswer: 56") == 1
    assert earned(task, 1, "1 + 2 + 4 + 7 + 14\nAnswer: 28") == 0


# ------------------------------------------------------------------------------------------------------------- columns


def rows_of(tmp_path: Path, columns: dict[str, str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    data = Data(path=str(toy_rows(tmp_path / "rows.jsonl", rows)), columns=columns)
    return list(load_task(data, MATH).rows)  # type: ignore[arg-type]


def test_a_column_is_a_template_or_the_value_of_another(tmp_path: Path) -> None:
    row = {"q": "2+2?", "nums": [1, 2], "deep": {"in": {"side": [3]}}, "a.b": 5, "answer": "x#4"}
    made = {
        "prompt": "{{ q }}\nUse {{ nums | join(' and ') }}.\n",
        "answer": "{{ answer.split('#')[1] }}",
        "list": "deep.in.side",
        "dotted": "a.b",
    }
    (found,) = rows_of(tmp_path, made, [row])
    assert found == {**row, "prompt": "2+2?\nUse 1 and 2.\n", "answer": "4", "list": [3], "dotted": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{{ questoin }}?",
            r"data\.columns\.prompt: rows\[1\]: 'questoin' is undefined \(did you mean question\?\); co",
        ),
        (
            "questoin",
            r"data\.columns\.prompt: rows\[1\] has no column 'questoin' \(did you mean question\?\); columns: ",
        ),
        ("question.text", r"rows\[1\] has no column 'question.text': it is inside 'b'; name one of them"),
        ("{{ question[5].x }}", r"data\.columns\.prompt: rows\[1\]: str object has no element 5; columns: question"),
        ("{{ 1 // (question == 'a') }}", r"data\.columns\.prompt: rows\[1\]: integer division or modulo by zero"),
    ],
)
def test_what_a_row_lacks_is_said_of_the_row(tmp_path: Path, text: str, message: str) -> None:
    first = {"question": "a", "questoin": "a"} if "oin" in text else {"question": "a"}
    if "text" in text:
        first = {"question": {"text": "a"}}  # type: ignore[dict-item]
    if "5" in text:
        first = {"question": [*"abcde", {"x": 1}]}  # type: ignore[dict-item]
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path, {"prompt": text}, [first, {"question": "b"}])


def test_a_template_that_is_not_jinja_is_refused_with_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"data\.columns: prompt: '\{\{ question' is not a Jinja template: "):
        Config.parse({"model": "m", "rewards": "format", "data": {"path": "x", "columns": {"prompt": "{{ question"}}})


@pytest.mark.parametrize("attack", ["{{ q.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os }}"])
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, attack: str) -> None:
    with pytest.raises(DataError, match=r"rows\[0\]: access to attribute '__\w+__' of '\w+' object is unsafe"):
        rows_of(tmp_path, {"prompt": attack}, [{"q": "a"}])


# ------------------------------------------------------------------------------------------------------------ mixtures


def mixture(tmp_path: Path, sizes: dict[str, int], weights: dict[str, float]) -> Task:
    for name, size in sizes.items():
        toy_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "answer": "1"} for i in range(size)])
    portions = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name, "weight": weights[name]} for name in sizes]
    return task_of({"data": {"mixture": portions}, "rewards": "math_answer"})


def test_a_mixture_draws_by_weight_and_each_dataset_has_epochs_of_its_own(tmp_path: Path) -> None:
    task = mixture(tmp_path, {"a": 30, "b": 7, "c": 11}, {"a": 6.0, "b": 3.0, "c": 1.0})
    drawn = [task.rows[i] for step in range(500) for i in task.rows_for_step(step, 4, seed=3)]
    share = {name: count / len(drawn) for name, count in Counter(row["dataset"] for row in drawn).items()}
    assert share == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, abs=0.03)
    for name, size in (("a", 30), ("b", 7), ("c", 11)):
        mine = [row["prompt"] for row in drawn if row["dataset"] == name]
        epochs = [mine[start : start + size] for start in range(0, len(mine) - size, size)]
        assert len(epochs) > 10
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1


def test_the_draw_is_a_pure_function_of_seed_and_step(tmp_path: Path) -> None:
    sizes = {"a": 30, "b": 7}
    one, other = (mixture(tmp_path, sizes, {"a": 1.0, "b": 2.0}) for _ in range(2))
    forwards = [one.rows_for_step(step, 4, seed=3) for step in range(20)]
    assert forwards == [other.rows_for_step(step, 4, seed=3) for step in reversed(range(20))][::-1]
    assert forwards != [one.rows_for_step(step, 4, seed=4) for step in range(20)]


def test_a_mixture_is_written_down_and_reads_back_equal() -> None:
    tree = {"mixture": [{"path": "a.jsonl", "weight": 2, "columns": {"prompt": "q"}}, {"path": "gym:gcd"}]}
    config = Config.parse({"model": "m", "rewards": "math_answer", "data": tree})
    assert Config.parse(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data: names no rows; set path: a file or a hub id, or mixture"),
        ({"path": "a", "mixture": [{"path": "b"}]}, "data: path beside mixture would have no effect; write it in the"),
        ({"mixture": [{"path": "b"}], "limit": 3}, "data: limit beside mixture would have no effect"),
        ({"mixture": [{"path": "b"}, {"path": "b"}]}, "data: mixture has two datasets called b; give one of them"),
        ({"mixture": [{"path": "b", "weight": 0}]}, r"data.mixture\[0\].weight: 0; input should be greater than 0"),
        ({"mixture": [{"weight": 1}]}, r"data.mixture\[0\].path: missing; set path: A .jsonl"),
    ],
)
def test_a_mixture_that_cannot_be_meant_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.parse({"model": "m", "rewards": "math_answer", "data": data})


def test_what_is_wrong_with_a_dataset_of_a_mixture_names_its_place(tmp_path: Path) -> None:
    good = str(toy_rows(tmp_path / "rows.jsonl"))
    for wrong, message in (
        ({"path": "nowhere.jsonl"}, r"data\.mixture\[1\]\.path: nowhere\.jsonl: no such file"),
        ({"path": good, "name": "b", "options": {"a": 1}}, r"data\.mixture\[1\]\.options: only gym:NAME has options"),
        (
            {"path": good, "name": "b", "columns": {"q": "r"}},
            r"data\.mixture\[1\]\.columns\.q: rows\[0\] has no column",
        ),
    ):
        with pytest.raises(DataError, match=message):
            task_of({"data": {"mixture": [{"path": good}, wrong]}, "rewards": "math_answer"})


def test_a_dataset_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    task = mixture(tmp_path, {"a": 3, "b": 3}, {"a": 1.0, "b": 1.0})
    left = without_held_out(task, Task([row for row in task.rows if row["dataset"] == "b"], MATH))
    with pytest.raises(
        DataError, match=r"data\.mixture: no row of b is left to train on; take it out of the mixture, or add rows"
    ):
        left.rows_for_step(0, 2, seed=0)


def test_options_are_for_gym_alone(tmp_path: Path) -> None:
    path = str(toy_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"data\.options: only gym:NAME has options, and the path here is .*rows"):
        load_task(Data(path=path, options={"size": 3}), MATH)


# ---------------------------------------------------------------------------------------------- training and evaluation


def test_a_fraction_is_held_out_by_the_prompt_and_never_trained_on(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is {i % 100}?" if i < 100 else f" what  is {i % 100}? ", "answer": "1"} for i in range(200)
    ]
    train, held_out = hold_out(Task(rows, MATH), 0.2)
    assert len(train.rows) + len(held_out.rows) == 200
    assert 20 <= len(held_out.rows) <= 60
    assert not {normal_form(r["prompt"]) for r in train.rows} & {normal_form(r["prompt"]) for r in held_out.rows}
    fewer, _ = hold_out(Task(rows[:50], MATH), 0.2)
    assert [row for row in train.rows if row in rows[:50]] == list(fewer.rows)


def test_a_fraction_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"evaluation\.fraction: 0\.01 of 2 rows leaves 2 to train on and 0 to evaluate"
    ):
        hold_out(Task([{"prompt": "c"}, {"prompt": "d"}], MATH), 0.01)


def test_held_out_prompts_are_taken_out_of_the_training_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    task = Task([{"prompt": f"Question {i}"} for i in range(10)], MATH, system="Think.")
    held_out = Task([{"prompt": [{"role": "user", "content": "QUESTION  4"}]}, {"prompt": "another"}], MATH)
    with caplog.at_level(logging.WARNING, "groupwise"):
        left = without_held_out(task, held_out)
    assert [row["prompt"] for row in left.rows] == [f"Question {i}" for i in range(10) if i != 4]
    assert caplog.messages == [
        "data: 1 of 10 prompts are held out, too, such as rows[4] 'question 4'; left out of the training"
    ]


def test_evaluating_on_the_training_prompts_themselves_leaves_them_all(caplog: pytest.LogCaptureFixture) -> None:
    task = Task([{"prompt": "a"}, {"prompt": "b"}], MATH)
    with caplog.at_level(logging.WARNING, "groupwise"):
        assert without_held_out(task, task) is task
    assert "evaluations will tell how well they were learned" in caplog.text


def test_a_run_file_reaches_the_split_and_the_deduplication(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    toy_rows(tmp_path / "test.jsonl", [{"prompt": "w5"}, {"prompt": "w60"}])
    parts = build(toy_config(tmp_path, evaluation={"fraction": 0.25}))
    assert parts.held_out is not None
    assert len(parts.task.rows) + len(parts.held_out.rows) == 32
    assert 3 <= len(parts.held_out.rows) <= 14
    with caplog.at_level(logging.WARNING, "groupwise"):
        parts = build(toy_config(tmp_path, evaluation={"data": {"path": str(tmp_path / "test.jsonl")}}))
    assert len(parts.task.rows) == 31
    assert "1 of 32 prompts are held out, too, such as rows[3] 'w5'" in caplog.text


def test_a_mixture_with_a_fraction_and_a_curriculum_trains(tmp_path: Path) -> None:
    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "a.jsonl", [{"q": f"w{i}"} for i in range(2, 30)])
    toy_rows(tmp_path / "b.jsonl", [{"deep": {"prompt": f"w{i} w{i}"}} for i in range(2, 10)])
    mixture = [
        {"path": str(tmp_path / "a.jsonl"), "columns": {"prompt": "{{ q }}"}, "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "columns": {"prompt": "deep.prompt"}},
    ]
    config = toy_config(
        tmp_path,
        data={"mixture": mixture},
        evaluation={"fraction": 0.2, "every": 2},
        curriculum={"visits": 1},
        output=str(tmp_path / "run"),
    )
    run = train(config)
    prompts = {row["prompt"] for step in range(1, 7) for row in sampled(run.folder, step)}
    assert {len(prompt.split()) for prompt in prompts} == {1, 2}
    assert run.after is not None
    assert not prompts & {rollout.example["prompt"] for rollout in run.after.rollouts}
    written = Config.load(run.folder / "config.yaml")
    assert replace(written, engine=config.engine) == config.resolve()


def test_a_fraction_beside_held_out_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation\.fraction: 0\.1; evaluation\.data names held-out prompts already"
    ):
        toy_config(tmp_path, evaluation={"data": {"path": "x"}, "fraction": 0.1})


def test_the_small_files_are_what_the_hub_has() -> None:
    """The columns and their types, from the dataset cards."""
    kinds = {
        name: {column: type(value).__name__ for column, value in json.loads(line).items()}
        for name in ("gsm8k", "math", "dapo", "countdown")
        for line in (HERE / f"{name}.jsonl").read_text().splitlines()
    }
    assert kinds == {
        "gsm8k": {"question": "str", "answer": "str"},
        "math": {"problem": "str", "level": "str", "type": "str", "solution": "str"},
        "dapo": {
            "data_source": "str",
            "prompt": "list",
            "ability": "str",
            "reward_model": "dict",
            "extra_info": "dict",
        },
        "countdown": {"target": "int", "nums": "list"},
    }
