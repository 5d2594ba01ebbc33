"""Train a model in five lines.

    python examples/five_lines.py [MODEL DATA]

By default on what `groupwise quickstart` leaves behind: a small base model, and sums to do.
"""

import sys

import groupwise as gw

model, data = sys.argv[1:3] or ("runs/base-models/seed-0", "runs/data/seed-0/train.jsonl")

config = gw.Config(
    model=model,
    data=gw.Data(path=data),
    rewards=("math_answer", "format"),
    steps=5,
    sampling=gw.Sampling(max_tokens=64),
    optimizer=gw.Optimizer(learning_rate=8e-5),
)
run = gw.train(config)
print(f"the trained model is in {run.folder / 'model'}")
