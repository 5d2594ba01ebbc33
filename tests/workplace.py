"""Where users make mistakes: a folder with a model, prompts, rewards and a run file, and the many ways to spoil them.

A message has four parts, and a `Mistake` spells a piece of each: the place, the value that stands there, what is
accepted, and the way out.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.torch import load_file, save_file
from toys import toy_rows
from transformers import T5Config, T5ForConditionalGeneration

from groupwise import cli
from groupwise.engines.local_sampler import LocalSampler

REWARDS = """
import math

CONSTANT = 1.0

def low(rollout):
    return float(rollout.text.split()[:1] in [[f"w{i}"] for i in range(2, 20)])

def in_a_batch(prompts, completions, answer, **columns):
    return [float(answer[i] in completions[i]) for i in range(len(completions))]

def too_many(prompts, completions, **columns):
    return [1.0] * (len(completions) + 1)

def dictionary(rollout):
    return {"score": 1.0}

def raises(rollout):
    return 1 / 0

def not_a_number(rollout):
    return math.nan

def infinite(prompts, completions, **columns):
    return [math.inf for _ in completions]

def nothing(rollout):
    return None

def nothing_for_all(completions):
    return None

def one_for_all(completions):
    return 1.0

def words(completions):
    return ["1.0" for _ in completions]

def nested(completions):
    return [[1.0] for _ in completions]

def by_name(completions):
    return {"format": 1.0}

def mistaken(a, b):
    return 1.0

def needs_solution(prompts, completions, solution):
    return [0.0] * len(completions)
"""
TINY = ["sampling.max_tokens=4", "steps=2", "prompts_per_step=4", "group_size=4", "optimizer.learning_rate=1e-2"]
MESSAGES = [{"role": "user", "content": "w5"}]
HERE = "/home/me"
"""What the page shows in place of the folder that the cases ran in."""


def workplace(folder: Path, model: Path) -> None:
    """Put model/, rows.jsonl, mine.py and run.yaml into the folder."""
    (folder / "model").symlink_to(model)
    toy_rows(folder / "rows.jsonl")
    (folder / "mine.py").write_text(REWARDS)
    run = {"model": "model", "data": {"path": "rows.jsonl"}, "rewards": ["mine.py:low"], "steps": 2}
    run |= {"prompts_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 4}, "output": "run"}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def training(data: str = "rows.jsonl", reward: str = "mine.py:low", model: str = "model") -> list[str]:
    """The arguments of a small run."""
    return ["train", "--model", model, "--data", data, "--reward", reward, *TINY]


@dataclass(frozen=True)
class Mistake:
    """One thing that a user did, and a piece of each part of the message."""

    arguments: list[str]
    place: str
    value: str
    accepted: str
    way_out: str
    prepare: Callable[[], object] | None = None
    """Makes the files that it needs in the working directory, which is a `workplace`."""
    machine: Mapping[str, object] = field(default_factory=dict[str, object])
    """What functions of the machine return: free memory, free disk, ..."""

    def message(self) -> str:
        """What the command says in the working directory; it exits with 2 and has sampled nothing.

        Raises:
            AssertionError: it did anything else.
        """
        with contextlib.ExitStack() as stack:
            for name, value in self.machine.items():
                stack.enter_context(mock.patch(name, return_value=value))
            sampled = stack.enter_context(mock.patch.object(LocalSampler, "sample"))
            stack.enter_context(mock.patch.object(sys, "argv", ["groupwise", *self.arguments]))
            out, err = io.StringIO(), io.StringIO()
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            code = _exit_code()
        said = err.getvalue()
        assert (code, out.getvalue()) == (2, ""), said
        assert not sampled.called, "something was sampled"
        assert said.count("groupwise: ") == 1
        assert "Traceback" not in said
        return said.partition("groupwise: ")[2].strip().replace(str(Path.cwd()), HERE)


def says(mistake: Mistake, folder: Path, model: Path) -> str:
    """The message about a mistake that is made in a new `workplace` in the folder, which stays as it was.

    Raises:
        AssertionError: the command did anything else than saying so.
    """
    workplace(folder, model)
    with contextlib.chdir(folder):
        if mistake.prepare is not None:
            mistake.prepare()
        before = sorted(Path().rglob("*"))
        message = mistake.message()
        left = [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]
        assert left == before, "a refused run leaves nothing"
    return message


def _exit_code() -> object:
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code
    return 0


# Files that are wrong ------------------------------------------------------------------------------------------------


def a_file(name: str, content: str) -> Callable[[], object]:
    return lambda: Path(name).write_text(content)


def some_rows(name: str, *rows: Any) -> Callable[[], object]:
    return lambda: toy_rows(Path(name), [*rows] * (20 // len(rows)))


def a_model(damage: Callable[[Path], object]) -> Callable[[], object]:
    """A copy of the model at `damaged`, and what happened to it."""

    def prepare() -> None:
        shutil.copytree(Path("model"), Path("damaged"), symlinks=False)
        damage(Path("damaged"))

    return prepare


def without(*names: str) -> Callable[[], object]:
    return a_model(lambda folder: [(folder / name).unlink() for name in names])


def edited(name: str, **changes: Any) -> Callable[[], object]:
    """A model of which a JSON file has other values; None takes one out."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return a_model(damage)


def cut_short(name: str) -> Callable[[], object]:
    return a_model(lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]))


def in_shards(folder: Path) -> dict[str, str]:
    """Split the weights into two files with an index, as large models have them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in sorted(set(names.values())):
        part = {name: weights[name] for name in weights if names[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def a_lost_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def a_shard_cut_short(folder: Path) -> None:
    in_shards(folder)
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def an_index_cut_short(folder: Path) -> None:
    in_shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:40])


def a_lost_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def no_stop(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        values.pop("eos_token_id", None)
        values.pop("eos_token", None)
        (folder / name).write_text(json.dumps(values))


def a_translator() -> None:
    small = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(small).save_pretrained("t5")


def an_adapter() -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")


def a_strict_template() -> None:
    some_rows("chat.jsonl", {"prompt": [{"role": "solver", "content": "w5"}], "answer": "w5"})()
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('only users speak') }}{% endif %}"
    a_model(lambda folder: (folder / "chat_template.jinja").write_text(refuses))()


def a_used_folder() -> None:
    Path("used").mkdir()
    Path("used/config.yaml").write_text(Path("run.yaml").read_text())


def a_damaged_checkpoint() -> None:
    a_used_folder()
    saved = Path("used/checkpoints/step-00002")
    for folder in (saved, Path("used/rollouts"), Path("used/evaluations")):
        folder.mkdir(parents=True)
    (saved / "manifest.json").write_text('{"learner/optimizer.pt": {"bytes": 1, "sha256": ""}}')


def stored_steps(*steps: int) -> Callable[[], object]:
    """A run with a file of rollouts for each of these steps, of which it is not known what they hold."""

    def prepare() -> None:
        a_used_folder()
        Path("used/rollouts").mkdir()
        for step in steps:
            pq.write_table(pa.table({"step": [step]}), f"used/rollouts/step-{step:05d}.parquet")

    return prepare


def a_parquet_without_prompts() -> None:
    pq.write_table(pa.table({"question": ["w3"] * 20}), "other.parquet")


MEND = "set `trial: false` on rewards."


# One mistake of a kind -----------------------------------------------------------------------------------------------


def reward(name: str, value: str, accepted: str = "a finite number for any text", way_out: str = "") -> Mistake:
    return Mistake(training(reward=f"mine.py:{name}"), f"rewards.{name}", value, accepted, way_out or f"{MEND}{name}")


def setting(text: str, value: str, accepted: str, way_out: str = "") -> Mistake:
    """An override whose place is what stands before its equals sign."""
    place = text.partition("=")[0]
    return Mistake([*training(), text], place, value, accepted, way_out or accepted)


def data(
    name: str, content: str | list[Any], value: str, accepted: str, way_out: str = "", place: str = "data"
) -> Mistake:
    """A file of prompts with this content."""
    prepare = a_file(name, content) if isinstance(content, str) else some_rows(name, *content)
    return Mistake(training(data=name), place, value, accepted, way_out or accepted, prepare)


def model(
    prepare: Callable[[], object], value: str, accepted: str, way_out: str = "", path: str = "damaged"
) -> Mistake:
    return Mistake(training(model=path), path, value, accepted, way_out or accepted, prepare)
