"""How an update of ours grows: with the group size, with the vocabulary, and with groups that have no signal.

Time is that of the update alone, on rows made up for it; memory is counted above the weights, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.plot import Series, chart

from benchmarks.common import ROOT, SMOKE, grown_mb, machine, publish, resident_mb, save_picture, table
from benchmarks.workloads import MODELS, Model, Shape, make

REPEATS = 1 if SMOKE else 4
PROMPT, RESPONSE = (32, 4) if SMOKE else (1024, 16)
GROUPS = (1, 2) if SMOKE else (1, 2, 4, 6, 8, 10, 12, 14, 16)
VOCABULARIES = (80, 1000) if SMOKE else (80, 8000, 32000, 80000, 152000)
TOKENS = 32 if SMOKE else 512
SILENT = (0.0, 0.5, 0.9)


def learner_of(folder: Path) -> Any:
    """The learner of the local engine."""
    import torch

    from groupwise.engines import Optimizer
    from groupwise.engines.local import local_engine

    return local_engine(
        folder,
        dtype=torch.float32,
        device="cpu",
        max_batch_tokens=2**17,
        microbatch_tokens=2**14,
        optimizer=Optimizer(),
        temperature=1.0,
        total_updates=100,
    ).learner


def rows_of(shape: Shape, vocabulary: int, silent: float = 0.0) -> list[Any]:
    """Made-up rollouts, rewards 0 and 1 in turn, or all 0 in a share of the groups."""
    import numpy as np

    from groupwise.records import Rollout

    rng = np.random.default_rng(0)
    rows: list[Any] = []
    for group in range(shape.prompts):
        prompt = rng.integers(0, vocabulary, shape.prompt)
        flat = group < round(silent * shape.prompts)
        for index in range(shape.group):
            tokens = np.concatenate([prompt, rng.integers(0, vocabulary, shape.completion)]).astype(np.int32)
            said = np.arange(len(tokens)) >= shape.prompt
            logprobs = np.where(said, -np.log(vocabulary), 0.0).astype(np.float32)
            reward = 0.0 if flat else float(index % 2)
            rows.append(Rollout(tokens, said, logprobs, group, rewards={"made up": reward},
                                reward_weights={"made up": 1.0}, reward=reward))  # fmt: skip
    return rows


def update_of(learner: Any, rows: Sequence[Any], spread: bool = False) -> Callable[[], None]:
    """An update on these rows; `spread` gives every row an advantage, as a group of one has none."""
    from groupwise.algorithms import Algorithm

    algorithm = Algorithm()
    credited = algorithm.credit(rows)
    if spread:
        credited = [dataclasses.replace(row, advantages=row.loss_mask.astype("float32")) for row in credited]

    def update() -> None:
        for batch in algorithm.batches(credited):
            learner.update(batch, algorithm.loss, per_token=algorithm.per_token)

    return update


def fastest(update: Callable[[], None]) -> float:
    """Seconds of the fastest of some updates, after one to warm up."""
    update()
    taken: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began)
    return min(taken)


def by_group_size(model: Model) -> dict[str, list[float]]:
    """Seconds of an update on one group, for each of `GROUPS`, its prompt shared and not."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"shared": [], "padded": []}
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), model, Shape(PROMPT, RESPONSE, 1, 1))
        for way, seconds in found.items():
            learner = learner_of(Path(scratch))
            if way == "padded":
                learner._forward._give_up("is told to, by a benchmark,")
            for size in GROUPS:
                rows = rows_of(Shape(PROMPT, RESPONSE, size, 1), model.vocabulary)
                seconds.append(fastest(update_of(learner, rows, spread=True)))
    return found


def by_silence(model: Model) -> list[float]:
    """Seconds of an update on ten groups, for each share of them without signal."""
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), model, Shape(64, 64, 8, 10))
        learner = learner_of(Path(scratch))
        rows = [rows_of(Shape(64, 64, 8, 10), model.vocabulary, silent) for silent in SILENT]
        return [fastest(update_of(learner, part)) for part in rows]


def memory_of_update(way: str, vocabulary: int) -> None:
    """Print how far the second update raises memory, and the size of the gradient [MB]; in a process of its own."""
    import torch

    model = Model(2, 128, vocabulary, threads=1)
    shape = Shape(TOKENS // 8, TOKENS // 8, 8, 1)
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), model, shape)
        learner = learner_of(Path(scratch))
    rows = rows_of(shape, vocabulary)
    update = update_of(learner, rows) if way == "ours" else plain_update(learner._model, rows)
    update()
    before = resident_mb()
    update()
    size = sum(p.numel() * p.element_size() for p in learner._model.parameters() if isinstance(p, torch.Tensor))
    print(json.dumps({"grown_mb": grown_mb(before), "gradient_mb": size / 2**20}))


def plain_update(model: Any, rows: Sequence[Any]) -> Callable[[], None]:
    """What one writes first: logits of every token, their log-softmax, and the same AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.stack([torch.from_numpy(row.tokens).long() for row in rows])
    start = int(rows[0].loss_mask.argmax())

    def update() -> None:
        logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        said = logprobs.gather(-1, tokens[:, 1:, None])[:, start - 1 :]
        (-said.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_vocabulary() -> dict[str, list[dict[str, float]]]:
    """Memory of an update, for each of `VOCABULARIES`."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "plain logits": []}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for way, figures in found.items():
        for vocabulary in VOCABULARIES:
            command = [sys.executable, "-m", "benchmarks.sweeps", "memory", way, str(vocabulary)]
            command += ["--smoke"] if SMOKE else []
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{way}, {vocabulary}: {done.stderr[-3000:]}")
            figures.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return found


def of_group_size(found: dict[str, list[float]]) -> str:
    """The part of the page about the group size."""
    curves = [Series(way, seconds, GROUPS) for way, seconds in found.items()]
    shown = save_picture("group_size", chart(f"Seconds of an update, {PROMPT} prompt tokens", curves, x_label="G"))
    rows = [[str(size), *(f"{1000 * s:.0f} ms" for s in both)]
            for size, *both in zip(GROUPS, *found.values(), strict=True)]  # fmt: skip
    each = {way: 1000 * (s[-1] - s[0]) / (GROUPS[-1] - GROUPS[0]) for way, s in found.items()}
    return (
        f"**Group size.** An update of the tiny model on one group, {PROMPT} tokens of prompt and {RESPONSE} of each "
        f"response, on one thread. One response more costs {each['shared']:.1f} ms where the group shares its prompt, "
        f"and {each['padded']:.0f} ms where every row has a copy.\n\n{shown}\n\n"
        + table(("G", "prompt shared", "padded rows"), rows)
    )


def of_vocabulary(found: dict[str, list[dict[str, float]]]) -> str:
    """The part of the page about the vocabulary."""
    beyond = {way: [one["grown_mb"] - one["gradient_mb"] for one in figures] for way, figures in found.items()}
    curves = [Series(way, megabytes, VOCABULARIES) for way, megabytes in beyond.items()]
    title = "MB that an update takes beyond weights, gradient and AdamW"
    shown = save_picture("vocabulary", chart(title, curves, x_label="vocabulary"))
    rows = [
        [f"{size:,}", f"{ours['gradient_mb']:.0f} MB", f"{ours['grown_mb']:.0f} MB", f"{plain['grown_mb']:.0f} MB"]
        for size, ours, plain in zip(VOCABULARIES, found["ours"], found["plain logits"], strict=True)
    ]
    return (
        f"**Vocabulary.** How far the second update on {TOKENS} response tokens (8 responses of {TOKENS // 8}) raises "
        "resident memory: gradient and what is computed on the way. Hidden size 128, two layers, embedding tied; the "
        f"gradient is as large as the weights, and the picture leaves it out.\n\n{shown}\n\n"
        + table(("V", "gradient", "an update of ours", "plain logits"), rows)
    )


def of_silence(seconds: Sequence[float]) -> str:
    """The part of the page about groups without signal."""
    rows = [[f"{silent:.0%}", f"{1000 * s:.0f} ms", f"{seconds[0] / s:.1f}x"]
            for silent, s in zip(SILENT, seconds, strict=True)]  # fmt: skip
    return (
        "**Groups without signal.** An update of the tiny model on ten groups of 8, 64 tokens of prompt and 64 of each "
        "response; groups whose rewards are all equal are not forwarded.\n\n"
        + table(("of the groups", "an update", "times as fast"), rows)
    )


def main() -> None:
    """Every sweep."""
    where = machine() | {"threads": "1"}
    data = {
        "group_size": {"at": GROUPS, "seconds": (groups := by_group_size(MODELS["tiny"]))},
        "vocabulary": {"at": VOCABULARIES, "memory": (vocabularies := by_vocabulary())},
        "silence": {"at": SILENT, "seconds": (silences := by_silence(MODELS["tiny"]))},
    }
    text = "\n\n".join((of_group_size(groups), of_vocabulary(vocabularies), of_silence(silences)))
    publish("sweeps", "How an update grows", text, data, where)


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        memory_of_update(sys.argv[2], int(sys.argv[3]))
    else:
        main()
