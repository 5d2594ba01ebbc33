"""Two rewards of your own, one in each of the two signatures, beside a built-in one.

    python examples/custom_reward.py [MODEL DATA]

On the command line the same functions are `--reward examples/custom_reward.py:brevity`, and in a run file
`rewards: [math_answer, {use: "examples/custom_reward.py:brevity", weight: 0.1}]`.
"""

import sys

import groupwise as gw


def brevity(rollout: gw.Rollout) -> float:
    """Ours: one rollout to one number.  Here 1 for an empty completion, falling to 0 at 64 tokens."""
    return max(0.0, 1 - rollout.num_completion_tokens / 64)


def right_length(prompts: list, completions: list, answer: list[str], **columns: list) -> list[float | None]:
    """TRL's: lists to a list; a column of the data arrives under its name.  None is no opinion on that sample.

    With chat prompts a completion is a list of messages, as in TRL.  An exception, nan or inf marks a sample as not
    scored; it is then left out, and never counts as 0.
    """
    texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    boxed = [text.rpartition("\\boxed{")[2].rstrip("}") if "\\boxed{" in text else None for text in texts]
    return [None if said is None else float(len(said) == len(a)) for said, a in zip(boxed, answer, strict=True)]


def main() -> None:
    model, data = sys.argv[1:3] or ("runs/base-models/seed-0", "runs/data/seed-0/train.jsonl")
    config = gw.Config(
        model=model,
        data=gw.Data(path=data),
        # Functions fit wherever a name does; `Reward` gives one a weight.  The first is the headline.
        rewards=("math_answer", gw.Reward(use=brevity, weight=0.1), gw.Reward(use=right_length, weight=0.2)),
        steps=5,
        sampling=gw.Sampling(max_tokens=64),
        optimizer=gw.Optimizer(learning_rate=8e-5),
    )
    run = gw.train(config)
    print(f"metrics.jsonl in {run.folder} has reward/math_answer, reward/brevity and reward/right_length")


if __name__ == "__main__":
    main()
