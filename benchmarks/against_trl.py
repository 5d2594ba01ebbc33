"""A whole training step beside TRL's: same weights, prompts, completion lengths, threads and loss, interleaved.

Every measurement is a process of its own (`python -m benchmarks.against_trl worker SYSTEM MODEL SHAPE FOLDER`).  TRL
runs as it comes (bf16 autocast and gradient checkpointing) and tuned (float32, no checkpointing); the ratio is to the
faster.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine, publish, table

WARMUP = 1
SYSTEMS = ("ours", "trl tuned", "trl default")


@dataclass(frozen=True)
class Shape:
    """Prompt tokens, completion tokens, completions a prompt, prompts a step."""

    prompt: int
    completion: int
    group: int
    prompts: int
    ragged: bool = False
    """Completions end by themselves, and half of the groups have rewards that are all equal."""


@dataclass(frozen=True)
class Model:
    """A Qwen3 with random weights."""

    layers: int
    hidden: int
    vocabulary: int
    threads: int
    """For both: a model of 0.8 M parameters gains nothing from a second thread and stalls when the core is shared."""
    steps: int
    """Measured in a process, after one to warm up."""
    rounds: int
    """Processes of each system, interleaved."""


MODELS = {
    "tiny": Model(4, 128, 80, threads=1, steps=4, rounds=2),
    "mid": Model(8, 384, 32000, threads=2, steps=2, rounds=1),
}
CASES: list[tuple[str, str, Shape]] = [
    ("tiny", "long prompt", Shape(1024, 64, 8, 1)),
    ("tiny", "long answer", Shape(128, 512, 8, 1)),
    ("tiny", "small", Shape(16, 16, 16, 8)),
    ("tiny", "ragged", Shape(64, 256, 8, 4, ragged=True)),
    ("mid", "long prompt", Shape(1024, 64, 8, 1)),
    ("mid", "long answer", Shape(128, 256, 8, 1)),
]


def make(folder: Path, model: Model, shape: Shape) -> None:
    """A model folder whose end of sequence is a token that ends completions only in the ragged case, and prompts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {f"w{i}": i for i in range(model.vocabulary - 2)} | {
        "<eos>": model.vocabulary - 2,
        "<pad>": model.vocabulary - 1,
    }
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=4 if model.hidden < 256 else 6,
        num_key_value_heads=2,
        head_dim=32 if model.hidden < 256 else 64,
        tie_word_embeddings=True,
        eos_token_id=model.vocabulary - 2,
        pad_token_id=model.vocabulary - 1,
        max_position_embeddings=4096,
    )
    network = Qwen3ForCausalLM(config)
    network.generation_config.eos_token_id = model.vocabulary - 2
    network.generation_config.pad_token_id = model.vocabulary - 1
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "prompt": " ".join(
                f"w{i}" for i in torch.randint(0, model.vocabulary - 2, (shape.prompt,), generator=generator)
            )
        }
        for _ in range(64)
    ]
    for index, row in enumerate(rows):
        row["dull"] = str(index % 2)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def some_reward(prompts: Sequence[str], completions: Sequence[str], dull: Sequence[str], **_: Any) -> list[float]:
    """0 or 1 by the text, for a dull prompt in the ragged case always 0."""
    ragged = os.environ.get("RAGGED") == "1"
    return [0.0 if ragged and d == "1" else float(len(c) % 2) for c, d in zip(completions, dull, strict=True)]


def ours(folder: Path, shape: Shape, steps: int) -> list[float]:
    """Seconds of each step of `groupwise.train`."""
    from rich.console import Console

    import groupwise as gw
    from groupwise.engines import local

    if not shape.ragged:
        # What TRL's min_new_tokens does: nothing ends a completion but its length.
        local.stop_token_ids = lambda *_: (-1,)
    run = gw.train(
        gw.Config.parse(
            {
                "model": str(folder),
                "data": {"path": str(folder / "prompts.jsonl")},
                "rewards": [{"use": f"{__file__}:some_reward"}],
                "algorithm": {"surrogate": {"high": 0.2}},
                "steps": WARMUP + steps,
                "prompts_per_step": shape.prompts,
                "group_size": shape.group,
                "sampling": {"max_tokens": shape.completion},
                "engine": {"device": "cpu"},
                "output": str(folder / "run"),
            }
        ),
        console=Console(quiet=True),
    )
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [record["seconds"] for record in records]


def trl(folder: Path, shape: Shape, steps: int, tuned: bool) -> list[float]:
    """Seconds of each step of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

    batch = shape.group * shape.prompts
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        max_steps=WARMUP + steps,
        learning_rate=1e-6,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=not tuned,
        gradient_checkpointing=not tuned,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        generation_kwargs={} if shape.ragged else {"min_new_tokens": shape.completion},
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=some_reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    return [end - begin for begin, end in zip(stamps[::2], stamps[1::2], strict=True)]


def worker(system: str, shape: Shape, folder: Path, steps: int) -> None:
    """Measure one system and print a JSON line."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = ours(folder, shape, steps) if system == "ours" else trl(folder, shape, steps, system == "trl tuned")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds[WARMUP:], "peak_mb": peak / 1024, "start_mb": before / 1024}))


def measure(system: str, name: str, shape: Shape) -> dict[str, Any]:
    """One system on one case, in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make(folder, MODELS[name], shape)
        arguments = [system, json.dumps(asdict(shape)), str(folder), str(MODELS[name].steps)]
        command = [sys.executable, "-m", "benchmarks.against_trl", "worker", *arguments]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(MODELS[name].threads),
            "RAGGED": str(int(shape.ragged)),
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{system}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Every case, the systems interleaved."""
    where = machine() | {"threads": ", ".join(f"{name} {model.threads}" for name, model in MODELS.items())}
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for model, name, shape in CASES:
        seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        peaks: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for _ in range(MODELS[model].rounds):
            for system in SYSTEMS:
                one = measure(system, model, shape)
                seconds[system] += one["seconds"]
                peaks[system].append(one["peak_mb"])
        medians = {system: statistics.median(values) for system, values in seconds.items()}
        best = min(medians["trl tuned"], medians["trl default"])
        peak = {system: max(values) for system, values in peaks.items()}
        lengths = f"{shape.prompt}, {shape.completion}, {shape.group}, {shape.prompts}"
        rows.append(
            [model, name, lengths, *(f"{medians[s]:.2f} s" for s in SYSTEMS), f"**{best / medians['ours']:.1f}x**",
             *(f"{peak[s]:.0f}" for s in SYSTEMS)]
        )  # fmt: skip
        print(rows[-1], flush=True)
        data.append({"model": model, "case": name, "shape": asdict(shape), "seconds": seconds, "peak_mb": peaks})
    head = ("model", "case", "P, R, G, prompts", *SYSTEMS, "ratio to TRL's best", *(f"{s}, peak MB" for s in SYSTEMS))
    text = (
        "Medians over the steps of interleaved processes (tiny: 2 of 4 steps, mid: 1 of 2); sampling, reward, update "
        "and log included. Peak memory is of the whole process, libraries included.\n\n" + table(head, rows)
    )
    publish("against_trl", "A training step beside TRL's", text, data, where)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Shape(**json.loads(sys.argv[3])), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
