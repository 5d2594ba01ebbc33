"""The loop is yours: a copy of `groupwise.train.loop`, changed.

    python examples/own_loop.py [MODEL DATA]

The change: of each group, only the two best and the two worst completions are trained on (max-variance down-sampling,
arXiv:2504.13818), so that a step costs half the training at the same sampling.
"""

import sys
from collections.abc import Sequence

import groupwise as gw
from groupwise.build import build
from groupwise.experience import experience
from groupwise.train import annotate

KEPT = 2


def extremes(rollouts: Sequence[gw.Rollout]) -> list[gw.Rollout]:
    """The best and the worst completions of each group; a stage is a function from rollouts to rollouts."""
    groups: dict[int, list[gw.Rollout]] = {}
    for rollout in rollouts:
        if rollout.valid:
            groups.setdefault(rollout.group, []).append(rollout)
    ranked = (sorted(group, key=lambda rollout: rollout.reward) for group in groups.values())
    return [rollout for group in ranked for rollout in (group[:KEPT] + group[KEPT:][-KEPT:])]


def main() -> None:
    model, data = sys.argv[1:3] or ("runs/base-models/seed-0", "runs/data/seed-0/train.jsonl")
    config = gw.Config(
        model=model,
        data=gw.Data(path=data),
        rewards=("math_answer", "format"),
        steps=5,
        sampling=gw.Sampling(max_tokens=64),
        optimizer=gw.Optimizer(learning_rate=8e-5),
    ).resolve()
    algorithm = config.algorithm
    parts = build(config)  # task, sampler, learner and tokenizer, checked against each other

    for step, sampled in experience(config, parts):  # whole groups, scored
        rollouts = extremes(sampled)  # <- the change
        rollouts = annotate(rollouts, parts, algorithm, config.updates_per_step, step)  # log-probs, where needed
        rollouts = algorithm.credit(rollouts)  # rewards -> advantages
        batches = algorithm.batches(rollouts, config.updates_per_step)  # tensors and token weights
        updates = [parts.learner.update(batch, algorithm.loss, per_token=algorithm.per_token) for batch in batches]
        parts.sampler.load(parts.learner.weights(), version=step + 1)
        reward, loss = sum(rollout.reward for rollout in sampled) / len(sampled), updates[0]["loss"]
        print(f"step {step + 1}: reward {reward:.3f}, trained on {len(rollouts)} of {len(sampled)}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
