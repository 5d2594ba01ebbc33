"""An algorithm is a value: take a named one and change a slot, or fill a slot with your own function.

python examples/custom_algorithm.py [MODEL DATA]
"""

import sys

import torch

import groupwise as gw

# DAPO with CISPO's surrogate: one slot is exchanged, the rest stays.
DAPO_CISPO = gw.replace(gw.DAPO, surrogate=gw.Cispo(cap=5.0))


def soft_clip(x: gw.LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A surrogate of your own: `-tanh(rho - 1) A`, which levels off instead of stopping, and what to log about it.

    It maps tokens to tokens, [B, T] each, and never sums: how much a token counts is the slot `aggregate`.  Strictly
    on-policy (rho = 1) its gradient is `-A grad log pi`, as that of every surrogate has to be.
    """
    ratio = x.log_ratio.exp()
    return -torch.tanh(ratio - 1) * x.advantages, {"ratio_distance": (ratio - 1).abs()}


MINE = gw.Algorithm(baseline=gw.LeaveOneOut(), scale=None, surrogate=soft_clip, aggregate=gw.SequenceMean())


def main() -> None:
    model, data = sys.argv[1:3] or ("runs/base-models/seed-0", "runs/data/seed-0/train.jsonl")
    for name, algorithm in (("DAPO with CISPO's surrogate", DAPO_CISPO), ("mine", MINE)):
        config = gw.Config(
            model=model,
            data=gw.Data(path=data),
            rewards=("math_answer", "format"),
            algorithm=algorithm,
            steps=3,
            updates_per_step=2,  # with a single update the ratio is 1, and all surrogates are the same
            sampling=gw.Sampling(max_tokens=64),
            optimizer=gw.Optimizer(learning_rate=8e-5),
        )
        print(f"{name}: {gw.train(config).folder}")


if __name__ == "__main__":
    main()
