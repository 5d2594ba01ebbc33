"""What several ranks compute, for tests/test_fsdp.py:  python ranked.py FOLDER, once for each rank

Each case trains the same batches with the engine of several processes and with the local one.  Rank 0 writes what it
found to FOLDER/found.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from models import STOP, TEMPERATURE, VOCABULARY, tiny_model
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import PreTrainedModel

from groupwise.adapters import Lora, attach
from groupwise.algorithms import Algorithm
from groupwise.engines import Optimizer, Request, Sampling
from groupwise.engines.critic import LocalCritic
from groupwise.engines.fsdp import FsdpLearner, SplitSampler
from groupwise.engines.fsdp_critic import FsdpCritic
from groupwise.engines.local_learner import LocalLearner
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.ranks import Ranks, join
from groupwise.errors import ConfigError, ModelError, NumericalError
from groupwise.guards import blaming, poisoned
from groupwise.presets import PRESETS
from groupwise.records import Batch, Rollout, collate
from groupwise.seeding import key

UPDATES = 5
OPTIMIZER = Optimizer(learning_rate=1e-3, schedule="cosine", warmup_updates=2, max_grad_norm=0.5)
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
        ("ppo", "qwen3", "float32"),
        ("ppo", "llama", "float64"),
    )
} | {
    "mixed": {"preset": "grpo", "architecture": "qwen3", "dtype": "float32", "mixed": True},
    "recomputed": {"preset": "grpo", "architecture": "llama", "dtype": "float64", "recompute": True},
    "lora": {"preset": "dapo", "architecture": "qwen3", "dtype": "float64", "lora": True},
}
CRITICS: dict[str, dict[str, Any]] = {
    f"critic {name}": {"preset": "ppo", "dtype": "float64", "architecture": "qwen3", **case}
    for name, case in {
        "float32": {"dtype": "float32"},
        "float64": {},
        "recomputed": {"recompute": True},
        "gpt2": {"architecture": "gpt2"},
        "llama": {"architecture": "llama"},
        "mixed": {"dtype": "float32", "mixed": True},
    }.items()
}
JUDGED = CRITICS["critic float64"]
RESUMED = {"preset": "grpo", "architecture": "qwen3", "dtype": "float64"}


def made_batch(algorithm: Algorithm, step: int, case: dict[str, Any]) -> Batch:
    """Groups of one to four completions of one to nine tokens, and one group in which nobody learns anything."""
    rng, dtype = np.random.default_rng(step), DTYPES[case["dtype"]]
    rollouts: list[Rollout] = []
    for group, size in enumerate((3, 1, 4, 2, 3)):
        prompt = rng.integers(2, VOCABULARY, rng.integers(2, 7))
        for member in range(size):
            said = rng.integers(2, VOCABULARY, rng.integers(1, 10))
            tokens = np.concatenate([prompt, said]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            reward = 0.0 if group == 3 else float(member == 0) + 0.1 * group
            rollouts.append(Rollout(tokens=tokens, loss_mask=mask, logprobs=0.0 * mask, group=group, reward=reward))
    # Near those of the first policy, and on both sides of the clip.
    said = starting_point(case).logprobs(collate(rollouts)).double().numpy()
    for i, rollout in enumerate(rollouts):
        logprobs = said[i, : len(rollout.tokens)] + rollout.loss_mask * rng.normal(0.0, 0.2, len(rollout.tokens))
        known = {"logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": logprobs - 0.1 * rollout.loss_mask}
        if algorithm.critic is not None:
            known["values"] = rollout.loss_mask * rng.normal(0.0, 0.3, len(rollout.tokens))
        rollouts[i] = dataclasses.replace(rollout, **known)
    (batch,) = algorithm.batches(algorithm.credit(rollouts), 1)
    return batch.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def starting_point(case: dict[str, Any]) -> LocalLearner:
    return LocalLearner(policy(case), OPTIMIZER, **settings(case))


def settings(case: dict[str, Any]) -> dict[str, Any]:
    # Few tokens at once, so that the ranks have several micro-batches, and not equally many.
    return {
        "temperature": TEMPERATURE,
        "microbatch_tokens": 40,
        "total_updates": 2 * UPDATES,
        "reference": partial(tiny_model, "qwen3", DTYPES[case["dtype"]], 1),
        "entropy": True,
        "mixed": case.get("mixed", False),
    }


def algorithm_of(case: dict[str, Any]) -> Algorithm:
    return PRESETS[case["preset"]].resolve(9)


def policy(case: dict[str, Any]) -> PreTrainedModel:
    model = tiny_model(case["architecture"], DTYPES[case["dtype"]])
    if case.get("recompute"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    if case.get("lora"):
        attach(model, Lora(rank=4), seed=3)
    return model


def split_learner(ranks: Ranks, case: dict[str, Any]) -> FsdpLearner:
    return FsdpLearner(ranks, policy(case), OPTIMIZER, **settings(case))


def split_critic(ranks: Ranks, case: dict[str, Any]) -> FsdpCritic:
    return FsdpCritic(ranks, policy(case), OPTIMIZER, **critic_settings(case))


def local_critic(case: dict[str, Any]) -> LocalCritic:
    return LocalCritic(policy(case), OPTIMIZER, **critic_settings(case))


def critic_settings(case: dict[str, Any]) -> dict[str, Any]:
    return {name: settings(case)[name] for name in ("microbatch_tokens", "total_updates", "mixed")}


def judged(critic: Any, case: dict[str, Any], steps: range) -> list[dict[str, float]]:
    algorithm = algorithm_of(case)
    return [critic.update(made_batch(algorithm, step, case), algorithm.value_loss) for step in steps]


def trained(learner: Any, case: dict[str, Any], steps: range) -> list[dict[str, float]]:
    algorithm = algorithm_of(case)
    batches = [made_batch(algorithm, step, case) for step in steps]
    return [learner.update(batch, algorithm.loss, per_token=algorithm.per_token) for batch in batches]


def largest(differences: Iterable[float]) -> float:
    """The largest; nan where one is nan, which `max` may pass over."""
    return float(np.max([*differences]))


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference between the weights of two learners."""
    one, other = dict(ours.weights()), dict(theirs.weights())
    assert one.keys() == other.keys()
    return largest(float((one[name] - other[name]).abs().max()) for name in one)


def scores_apart(ours: Any, theirs: Any, case: dict[str, Any], *, reference: bool = False) -> float:
    """The largest difference between the log-probs of two learners."""
    batch = made_batch(algorithm_of(case), 99, case)
    one, other = (learner.logprobs(batch, reference=reference) for learner in (ours, theirs))
    return float((one - other).abs().max())


def metrics_apart(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """The largest difference between metrics of the same names, relative to those above 1."""
    assert [one.keys() for one in ours] == [one.keys() for one in theirs]
    pairs = [(one[name], other[name]) for one, other in zip(ours, theirs, strict=True) for name in one]
    return largest(abs(x - y) / max(1.0, abs(y)) for x, y in pairs)


def critics_apart(ours: Any, theirs: LocalCritic, case: dict[str, Any], folder: Path) -> dict[str, float]:
    """The largest differences between values, weights and AdamW's averages; the latter as checkpoints have them."""
    batch = made_batch(algorithm_of(case), 99, case)
    found = {"values": float((ours.values(batch) - theirs.values(batch)).abs().max())}
    for name, critic in (("ours", ours), ("theirs", theirs)):
        (folder / name).mkdir(parents=True)
        critic.snapshot()(folder / name)
    dcp_to_torch_save(folder / "ours", folder / "whole.pt")
    state = torch.load(folder / "whole.pt")
    prefix = "transformer." if case["architecture"] == "gpt2" else "model."
    named = {name.removeprefix(prefix).replace("lm_head", "value_head"): of for name, of in state["weights"].items()}
    stored = safetensors.torch.load_file(folder / "theirs" / "critic.safetensors")
    assert named.keys() == stored.keys()
    found["weights"] = largest(float((named[name] - stored[name]).abs().max()) for name in named)
    averages = torch.load(folder / "theirs" / "optimizer.pt")
    for name in ("exp_avg", "exp_avg_sq"):
        pairs = zip(state[name].values(), averages.values(), strict=True)
        found[name] = largest(float((one - other[name]).abs().max()) for one, other in pairs)
    return found


# What rank 0 does, once in each of these; the others carry it out ----------------------------------------------------


def equals(learner: FsdpLearner, case: dict[str, Any]) -> dict[str, float]:
    """How far metrics, log-probs and weights are from those of one process."""
    local = starting_point(case)
    found = {"before": scores_apart(learner, local, case)}
    found["reference"] = scores_apart(learner, local, case, reference=True)
    found["metrics"] = metrics_apart(trained(learner, case, range(UPDATES)), trained(local, case, range(UPDATES)))
    return found | {"after": scores_apart(learner, local, case), "weights": apart(learner, local)}


def saves(learner: FsdpLearner, folder: Path) -> None:
    """A snapshot of half a training, written after the training has moved on."""
    trained(learner, RESUMED, range(2))
    learner.refresh_reference()
    trained(learner, RESUMED, range(2, UPDATES))
    write = learner.snapshot()
    trained(learner, RESUMED, range(UPDATES, UPDATES + 1))
    folder.mkdir()
    write(folder)


def resumes(learner: FsdpLearner, folder: Path) -> dict[str, float]:
    """How far a training that continues from `folder` is from one that was never stopped."""
    local = starting_point(RESUMED)
    trained(local, RESUMED, range(2))
    local.refresh_reference()
    trained(local, RESUMED, range(2, UPDATES))
    learner.restore(folder)
    rest = range(UPDATES, 2 * UPDATES)
    found = {"metrics": metrics_apart(trained(learner, RESUMED, rest), trained(local, RESUMED, rest))}
    found["reference"] = scores_apart(learner, local, RESUMED, reference=True)
    return found | {"weights": apart(learner, local)}


def critic_equals(critic: FsdpCritic, case: dict[str, Any], folder: Path) -> dict[str, float]:
    """How far metrics, values, weights and averages are from those of one process."""
    local = local_critic(case)
    ours, theirs = (judged(of, case, range(UPDATES)) for of in (critic, local))
    return {"metrics": metrics_apart(ours, theirs), **critics_apart(critic, local, case, folder)}


def critic_saves(critic: FsdpCritic, folder: Path) -> None:
    """A snapshot of half a training, written after the training has moved on; the one before is never written."""
    judged(critic, JUDGED, range(2))
    critic.snapshot()
    judged(critic, JUDGED, range(2, UPDATES))
    write = critic.snapshot()
    judged(critic, JUDGED, range(UPDATES, UPDATES + 1))
    folder.mkdir()
    write(folder)


def critic_resumes(critic: FsdpCritic, folder: Path) -> dict[str, float]:
    """How far a training that continues from `folder` is from one that was never stopped."""
    local = local_critic(JUDGED)
    judged(local, JUDGED, range(UPDATES))
    critic.restore(folder)
    ours, theirs = (judged(of, JUDGED, range(UPDATES, 2 * UPDATES)) for of in (critic, local))
    return {"metrics": metrics_apart(ours, theirs), **critics_apart(critic, local, JUDGED, folder / "resumed")}


def too_deep(values: Tensor, batch: Batch) -> Tensor:
    """A loss of values whose gradient at the rows of the third group is not finite."""
    return torch.where(batch.groups[:, None] == 2, values * 0.0, values.square() + 1.0).sqrt().sum()


def critic_refuses(critic: FsdpCritic, folder: Path) -> dict[str, Any]:
    """An update that is not finite, whom it is blamed on; then updates on fewer rows than ranks, and on none."""
    local, algorithm = local_critic(JUDGED), algorithm_of(JUDGED)
    batch, probe = made_batch(algorithm, 7, JUDGED), partial(critic.update, loss=poisoned(too_deep))
    found: dict[str, Any] = {"blamed": []}
    judged(critic, JUDGED, range(1))
    judged(local, JUDGED, range(1))
    try:
        with blaming(batch, "the critic's value", critic.values, probe):
            critic.update(batch, too_deep)
    except NumericalError as error:
        found["blamed"] = sorted({int(batch.groups[finding.row]) for finding in error.findings})
    parts = [batch.rows(torch.tensor(rows, dtype=torch.int64)) for rows in ([0, 1, 2], [4], [])]
    ours, theirs = ([of.update(part, algorithm.value_loss) for part in parts] for of in (critic, local))
    return {**found, "metrics": metrics_apart(ours, theirs), **critics_apart(critic, local, JUDGED, folder)}


def few_rows(learner: FsdpLearner, case: dict[str, Any]) -> dict[str, float]:
    """Updates on one group, on one row, and on none."""
    local, algorithm = starting_point(case), algorithm_of(case)
    batch = made_batch(algorithm, 7, case)
    parts = [batch.rows(torch.tensor(rows, dtype=torch.int64)) for rows in ([0, 1, 2], [4], [])]
    ours, theirs = ([of.update(part, algorithm.loss) for part in parts] for of in (learner, local))
    return {"metrics": metrics_apart(ours, theirs), "weights": apart(learner, local)}


def steep(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradient at the rows of the third group is not finite."""
    flat = torch.where(batch.groups[:, None] == 2, logprobs * 0.0, 1.0)
    return flat.sqrt().sum() + logprobs.sum(), {}


def refuses(learner: FsdpLearner, case: dict[str, Any]) -> dict[str, Any]:
    """An update that is not finite, whom it is blamed on, and whether the ranks are still in step."""
    local, algorithm = starting_point(case), algorithm_of(case)
    batch, probe = made_batch(algorithm, 7, case), partial(learner.update, loss=poisoned(steep))
    found: dict[str, Any] = {"blamed": []}
    try:
        with blaming(batch, "the policy's log-prob", learner.logprobs, probe):
            learner.update(batch, steep)
    except NumericalError as error:
        found["blamed"] = sorted({int(batch.groups[finding.row]) for finding in error.findings})
    found["metrics"] = metrics_apart(trained(learner, case, range(2)), trained(local, case, range(2)))
    try:
        learner.update(batch, lambda *arguments: steep(*arguments))
    except ConfigError as error:
        found["lambda"] = str(error)
    return found | {"weights": apart(learner, local)}


def samples(sampler: SplitSampler, local: LocalSampler) -> dict[str, Any]:
    """Whether completions are those of one process; and what a rank's mistake looks like."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, length).astype(np.int32) for length in (3, 5, 2, 4, 3)]
    requests = [Request(prompt, tuple(key(0, "test", i, j) for j in range(3))) for i, prompt in enumerate(prompts)]
    sampler.load((), version=4)
    local.load((), version=4)
    ours, theirs = (of.sample(requests, Sampling(max_tokens=6)) for of in (sampler, local))
    pairs = [pair for groups in zip(ours, theirs, strict=True) for pair in zip(*groups, strict=True)]
    found: dict[str, Any] = {
        "tokens": all(np.array_equal(one.tokens, other.tokens) for one, other in pairs),
        "logprobs": largest(float(np.abs(one.logprobs - other.logprobs).max()) for one, other in pairs),
        "versions": sorted({one.policy_version for one, _ in pairs}),
    }
    long = Request(np.full(64, 2, np.int32), (1,))  # the second request is that of rank 1
    try:
        sampler.sample([requests[0], long], Sampling(max_tokens=6))
    except ModelError as error:
        found["error"] = str(error)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with join(60.0, "cpu") as ranks:

        def together(name: str, member: Any, of_rank_0: Callable[[Any], Any]) -> None:
            if ranks.rank:
                ranks.serve()
            else:
                found[name] = of_rank_0(member)
                ranks.dismiss()

        for name, case in CASES.items():
            together(name, split_learner(ranks, case), partial(equals, case=case))
        together("few rows", split_learner(ranks, RESUMED), partial(few_rows, case=RESUMED))
        together("refused", split_learner(ranks, RESUMED), partial(refuses, case=RESUMED))
        together("resumed", split_learner(ranks, RESUMED), partial(resumes, folder=folder / "of one"))
        together("saved", split_learner(ranks, RESUMED), partial(saves, folder=folder / "of two"))
        for name, case in CRITICS.items():
            together(name, split_critic(ranks, case), partial(critic_equals, case=case, folder=folder / name))
        together("critic refused", split_critic(ranks, JUDGED), partial(critic_refuses, folder=folder / "refused"))
        critic_of_one = folder / "critic of one"
        together("critic resumed", split_critic(ranks, JUDGED), partial(critic_resumes, folder=critic_of_one))
        together("critic saved", split_critic(ranks, JUDGED), partial(critic_saves, folder=folder / "critic of two"))
        model = policy(RESUMED)
        local = LocalSampler(model, [STOP], max_batch_tokens=1000)
        together("sampled", SplitSampler(ranks, local), partial(samples, local=local))
        if ranks.rank:
            ranks.serve()
    if ranks.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # as `python -m groupwise` ends: threads of the process group may outlive the interpreter
