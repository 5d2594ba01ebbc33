"""What several ranks compute, for tests/test_fsdp.py:  python ranked.py FOLDER, once for each rank

Each case trains the same batches with the engine of several processes and with the local one.  Rank 0 writes what it
found to FOLDER/found.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import TEMPERATURE, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from groupwise.algorithms import Algorithm
from groupwise.engines import Optimizer
from groupwise.engines.fsdp import FsdpLearner
from groupwise.engines.local import LocalLearner
from groupwise.engines.ranks import Ranks, join
from groupwise.presets import PRESETS
from groupwise.records import Batch, Rollout

UPDATES = 5
OPTIMIZER = Optimizer(learning_rate=1e-2, schedule="cosine", warmup_updates=2, max_grad_norm=0.5)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
CASES: dict[str, dict[str, Any]] = {
    f"{preset} {architecture} {dtype}": {"preset": preset, "architecture": architecture, "dtype": dtype}
    for preset, architecture, dtype in (
        ("grpo", "qwen3", "float32"),
        ("dapo", "qwen3", "float32"),
        ("gspo", "llama", "float32"),
        ("grpo", "llama", "float64"),
        ("dapo", "qwen3", "float64"),
        ("gspo", "qwen3", "float64"),
        ("grpo", "gemma3", "float64"),
        ("grpo", "gpt2", "float64"),
    )
}


def made_batch(algorithm: Algorithm, step: int, dtype: torch.dtype) -> Batch:
    """Groups of one to four completions of one to nine tokens, and one group in which nobody learns anything."""
    rng = np.random.default_rng(step)
    rollouts: list[Rollout] = []
    for group, size in enumerate((3, 1, 4, 2, 3)):
        prompt = rng.integers(2, VOCABULARY, rng.integers(2, 7))
        for member in range(size):
            said = rng.integers(2, VOCABULARY, rng.integers(1, 10))
            tokens = np.concatenate([prompt, said]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            logprobs = np.where(mask, rng.normal(-4.0, 1.0, len(tokens)), 0.0)
            reward = 0.0 if group == 3 else float(member == 0) + 0.1 * group
            fields = {"old_logprobs": logprobs, "ref_logprobs": logprobs - 0.1 * mask}
            rollouts.append(
                Rollout(tokens=tokens, loss_mask=mask, logprobs=logprobs, group=group, reward=reward, **fields)
            )
    (batch,) = algorithm.batches(algorithm.credit(rollouts), 1)
    return batch.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def settings(model: PreTrainedModel) -> dict[str, Any]:
    # Few tokens at once, so that the ranks have several micro-batches, and not equally many.
    return {
        "temperature": TEMPERATURE,
        "microbatch_tokens": 40,
        "total_updates": 2 * UPDATES,
        "reference": lambda: tiny_model("qwen3", model.dtype, seed=1),
        "entropy": True,
    }


def algorithm_of(case: dict[str, Any]) -> Algorithm:
    return PRESETS[case["preset"]].resolve(9)


def policy(case: dict[str, Any]) -> PreTrainedModel:
    return tiny_model(case["architecture"], DTYPES[case["dtype"]], tie_word_embeddings=case["architecture"] != "llama")


def trained(learner: Any, case: dict[str, Any], steps: range) -> list[dict[str, float]]:
    algorithm = algorithm_of(case)
    batches = (made_batch(algorithm, step, DTYPES[case["dtype"]]) for step in steps)
    return [learner.update(batch, algorithm.loss, per_token=algorithm.per_token) for batch in batches]


def apart(ours: Iterator[tuple[str, torch.Tensor]], theirs: Iterator[tuple[str, torch.Tensor]]) -> float:
    """The largest difference between weights of the same names."""
    one, other = dict(ours), dict(theirs)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def compare(ranks: Ranks, case: dict[str, Any]) -> dict[str, Any]:
    """How far the metrics of each update, log-probs and weights are from those of one process; on rank 0."""
    model = policy(case)
    learner = FsdpLearner(ranks, model, OPTIMIZER, **settings(model))
    if ranks.rank:
        ranks.serve()
        return {}
    local = LocalLearner(policy(case), OPTIMIZER, **settings(model))
    batch = made_batch(algorithm_of(case), 99, DTYPES[case["dtype"]])
    found = {"before": float((learner.logprobs(batch) - local.logprobs(batch)).abs().max())}
    ours, theirs = trained(learner, case, range(UPDATES)), trained(local, case, range(UPDATES))
    assert [one.keys() for one in ours] == [one.keys() for one in theirs]
    found |= {"metrics": [{name: [one[name], other[name]] for name in one} for one, other in zip(ours, theirs)]}
    found["after"] = float((learner.logprobs(batch) - local.logprobs(batch)).abs().max())
    found["weights"] = apart(learner.weights(), local.weights())
    ranks.dismiss()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with join(60.0, "cpu") as ranks:
        for name, case in CASES.items():
            found[name] = compare(ranks, case)
        if ranks.rank == 0:
            (folder / "found.json").write_text(json.dumps(found))
            ranks.members.clear()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
