"""A step of a model with random weights, ours or TRL's, measured in a process of its own.

`python -m benchmarks.workloads SYSTEM STEPS SHAPE FOLDER` trains for `STEPS` steps after one to warm up, and prints a
`Run`.  A step lasts from the end of the one before to its own end: sampling, reward, update and log, on both sides.
Memory is counted from the moment at which the model is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, grown_mb, resident_mb

STOPS = 80
"""In the ragged case, one token in so many of a random model's ends its completion."""
OURS = {"ours": "float32", "ours mixed": "mixed"}
"""Our systems, and the `engine.dtype` of each."""
TRL: dict[str, dict[str, Any]] = {
    "trl tuned": {"bf16": False, "gradient_checkpointing": False},
    "trl default": {},
    "trl batching": {
        "bf16": False,
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": True,
        # Left alone, it reserves half of the free memory for keys and values.
        "transformers_continuous_batching_config": {"num_blocks": 64},
    },
}
"""TRL's systems: what each sets of GRPOConfig."""


@dataclass(frozen=True)
class Shape:
    """Prompt tokens, most completion tokens, completions a prompt, prompts a step."""

    prompt: int
    completion: int
    group: int
    prompts: int
    ragged: bool = False
    """Completions end by themselves, and half of the groups have rewards that are all equal."""

    def __str__(self) -> str:
        return f"{self.prompt}, {self.completion}, {self.group}, {self.prompts}"


@dataclass(frozen=True)
class Model:
    """A Qwen3 with random weights, its embedding tied."""

    layers: int
    hidden: int
    vocabulary: int
    threads: int
    """For both: a model of 0.8 M parameters gains nothing from a second thread and stalls when the core is shared."""

    @property
    def heads(self) -> int:
        return 4 if self.hidden < 256 else 6

    @property
    def head_size(self) -> int:
        return 32 if self.hidden < 256 else 64

    @property
    def body(self) -> int:
        """Parameters of the matrices of all layers."""
        attention = 2 * self.hidden * self.head_size * (self.heads + 2)
        return self.layers * (attention + 3 * self.hidden * 3 * self.hidden)


MODELS = {"tiny": Model(4, 128, 80, threads=1), "mid": Model(8, 384, 32000, threads=2)}


@dataclass(frozen=True)
class Run:
    """What a process measured; a value a step, the one that warms up left out."""

    wall: list[float] = field(default_factory=list[float])
    """Seconds."""
    cpu: list[float] = field(default_factory=list[float])
    """Seconds of all threads."""
    length: list[float] = field(default_factory=list[float])
    """Mean tokens of a completion, by the system's own log."""
    dull: list[float] = field(default_factory=list[float])
    """Share of completions whose group has equal rewards, by the system's own log."""
    split: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Ours only: seconds of each phase."""
    peak_mb: list[float] = field(default_factory=list[float])
    """Largest resident memory above that of the loaded model; one value a process."""

    def __add__(self, other: Run) -> Run:
        names = [one.name for one in dataclasses.fields(self)]
        return Run(**{name: getattr(self, name) + getattr(other, name) for name in names})


def make(folder: Path, model: Model, shape: Shape) -> None:
    """A model folder, in the ragged case with enough tokens that end a completion, and prompts without them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    size = model.vocabulary
    words = {f"w{i}": i for i in range(size - 2)} | {"<eos>": size - 2, "<pad>": size - 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    stops = list(range(size - 1 - (size // STOPS if shape.ragged else 1), size - 1))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=2,
        head_dim=model.head_size,
        tie_word_embeddings=True,
        eos_token_id=stops,
        pad_token_id=size - 1,
        max_position_embeddings=4096,
    )
    network = Qwen3ForCausalLM(config)
    logging.disable_progress_bar()
    network.generation_config.eos_token_id = stops
    network.generation_config.pad_token_id = size - 1
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = torch.randint(0, stops[0], (64, shape.prompt), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"prompt": " ".join(f"w{i}" for i in prompt)} for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def some_reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """0 or 1 by the text; in the ragged case always 0 for every second prompt of a step."""
    order = list(dict.fromkeys(prompts))
    dull = set(order[1::2]) if os.environ.get("RAGGED") == "1" else set[str]()
    return [0.0 if p in dull else float(len(c) % 2) for p, c in zip(prompts, completions, strict=True)]


class Clock:
    """Wall and CPU time at the end of each step, and memory since the model was loaded."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._began = self._loaded = self._peak = 0.0

    @property
    def elapsed(self) -> list[float]:
        """Seconds from the loaded model to the end of each step."""
        return [end - self._began for end in self._wall]

    def loaded(self) -> None:
        """The model is in memory."""
        self._loaded = resident_mb()
        self._began = time.perf_counter()

    def step(self) -> None:
        """A step has ended."""
        self._wall.append(time.perf_counter())
        self._cpu.append(time.process_time())
        self._peak = grown_mb(self._loaded)

    def watch_ours(self) -> None:
        """Be told by `groupwise.train`."""
        from groupwise.log import RunLog

        training: Any = importlib.import_module("groupwise.train")
        build, log_step = training.build, RunLog.step

        def build_and_note(*arguments: Any) -> Any:
            parts = build(*arguments)
            self.loaded()
            return parts

        def log_and_note(*arguments: Any) -> None:
            log_step(*arguments)
            self.step()

        training.build, RunLog.step = build_and_note, log_and_note

    def run(self, **logged: Any) -> Run:
        """What it saw, and what else the system logged of each step."""
        between = [[end - begin for begin, end in pairwise(times)] for times in (self._wall, self._cpu)]
        later = {name: values[1:] for name, values in logged.items()}
        return Run(wall=between[0], cpu=between[1], peak_mb=[self._peak], **later)


def ours(folder: Path, shape: Shape, steps: int, dtype: str) -> Run:
    """`groupwise.train`."""
    from rich.console import Console

    import groupwise as gw
    from groupwise.engines import local

    if not shape.ragged:
        # What TRL's min_new_tokens does: nothing ends a completion but its length.
        local.stop_token_ids = lambda *_: (-1,)
    clock = Clock()
    clock.watch_ours()
    run = gw.train(
        gw.Config.parse(
            {
                "model": str(folder),
                "data": {"path": str(folder / "prompts.jsonl")},
                "rewards": [{"use": f"{__file__}:some_reward"}],
                "algorithm": {"surrogate": {"high": 0.2}},
                "steps": steps + 1,
                "prompts_per_step": shape.prompts,
                "group_size": shape.group,
                "sampling": {"max_tokens": shape.completion},
                "engine": {"device": "cpu", "dtype": dtype, "threads": int(os.environ["OMP_NUM_THREADS"])},
                "output": str(folder / "run"),
            }
        ),
        console=Console(quiet=True),
    )
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    phases = [{k.removeprefix("seconds/"): v for k, v in r.items() if k.startswith("seconds/")} for r in records]
    return clock.run(
        length=[record["completion_length"] for record in records],
        dull=[record["frac_reward_zero_std"] for record in records],
        split=phases,
    )


def trl(folder: Path, shape: Shape, steps: int, choices: dict[str, Any]) -> Run:
    """TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    clock = Clock()

    class Stamp(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=shape.group * shape.prompts,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        max_steps=steps + 1,
        learning_rate=1e-6,
        generation_kwargs={} if shape.ragged else {"min_new_tokens": shape.completion},
        **trl_settings(),
        **choices,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=some_reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Stamp()],
    )
    clock.loaded()
    trainer.train()
    logged = [record for record in trainer.state.log_history if "completions/mean_length" in record]
    return clock.run(
        length=[record["completions/mean_length"] for record in logged],
        dull=[record["frac_reward_zero_std"] for record in logged],
    )


def trl_settings() -> dict[str, Any]:
    """What every run of TRL sets of GRPOConfig: our default algorithm, and nothing that costs time for no one."""
    return {
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }


def measure(system: str, model: Model, shape: Shape, steps: int, source: Path | None = None) -> Run:
    """One system on one case, in a process and a folder of its own; `source` is another `src` than this one's."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make(folder, model, shape)
        command = [sys.executable, "-m", "benchmarks.workloads", system, str(steps)]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(model.threads),
            "RAGGED": str(int(shape.ragged)),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{source or ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        done = subprocess.run(
            [*command, json.dumps(asdict(shape)), str(folder)],
            env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{system}: {done.stderr[-3000:]}")
        return Run(**json.loads(done.stdout.strip().splitlines()[-1]))


def worker(system: str, steps: int, shape: Shape, folder: Path) -> None:
    """Measure one system and print it as a JSON line."""
    run = ours(folder, shape, steps, OURS[system]) if system in OURS else trl(folder, shape, steps, TRL[system])
    print(json.dumps(asdict(run)))


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Shape(**json.loads(sys.argv[3])), Path(sys.argv[4]))
