"""Run folders made without a model, written by the same code that writes those of a training."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from texts import byte_tokenizer

from groupwise.algorithms import Algorithm
from groupwise.chat import Chat
from groupwise.config import Config
from groupwise.evaluate import Scores
from groupwise.log import RunLog
from groupwise.records import Rollout

PROMPTS = 4
GROUP = 4
STEPS = 12
WRONG = "I think it is 5"
TRAP = "</script><img src=x onerror=alert(1)>"
"""A completion that would be dangerous if the page took it for HTML."""


def made_chat() -> Chat:
    tokenizer = byte_tokenizer()
    return Chat(tokenizer, (tokenizer.eos_token_id,))


def made_rollout(chat: Chat, prompt: str, text: str, right: bool, group: int = 0, **changes: Any) -> Rollout:
    """A completion whose log-probs are -0.5, with the rewards `math_answer` and `format`."""
    asked = chat.prompt([{"role": "user", "content": prompt}])
    said = np.asarray(chat.tokenizer(text, add_special_tokens=False)["input_ids"] + list(chat.stop_ids), dtype=np.int32)
    tokens = np.concatenate([asked, said])
    mask = np.arange(len(tokens)) >= len(asked)
    rewards = {"math_answer": float(right), "format": 0.5}
    return Rollout(
        **{
            "tokens": tokens,
            "loss_mask": mask,
            "logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
            "entropies": np.where(mask, 0.7, 0.0).astype(np.float32),
            "group": group,
            "text": text,
            "rewards": rewards,
            "reward_weights": {"math_answer": 1.0, "format": 0.2},
            "reward": rewards["math_answer"] + 0.2 * rewards["format"],
            **changes,
        }
    )


def made_step(chat: Chat, step: int, *, prompts: int = PROMPTS, group_size: int = GROUP) -> list[Rollout]:
    """The groups of a step.  Of prompt p, the first p + 1 answers are right; in the last group one is truncated, one
    has no reward, and one is the trap."""
    rollouts: list[Rollout] = []
    for group in range(prompts):
        for sample in range(group_size):
            right = sample <= group % group_size
            question = f"What is {step} + {group}?"
            text = f"It is {step + group}, as sample {sample} says" if right else WRONG
            rollouts.append(made_rollout(chat, question, text, right, group, policy_version=step - 1))
    change = dataclasses.replace
    rollouts[-3] = change(rollouts[-3], finish_reason="length")
    rollouts[-2] = change(rollouts[-2], valid=False, problem="math_answer: raised ValueError: no verdict")
    trap = made_rollout(chat, f"What is {step} + {prompts - 1}?", TRAP, False, prompts - 1)
    rollouts[-1] = change(trap, policy_version=step - 1)
    return Algorithm().credit(rollouts)


def made_scores(chat: Chat, rights: Sequence[bool]) -> Scores:
    """An evaluation with one answer a prompt."""
    rollouts = [
        made_rollout(chat, f"Held-out {i}?", f"surely {i}" if right else WRONG, right, i)
        for i, right in enumerate(rights)
    ]
    mean = sum(rights) / len(rights)
    means = {"math_answer": mean, "format": 0.5}
    return Scores({"greedy": np.array(rights, dtype=float)}, range(len(rights)), means, 10.0, 0.0, rollouts)


def made_run(folder: Path, *, steps: int = STEPS, of: int | None = None, **changes: Any) -> Path:
    """A run of `steps` steps out of `of`, with an evaluation before and one after."""
    folder.mkdir(parents=True, exist_ok=True)
    least = {"model": "some/model", "data": {"path": "rows.jsonl"}, "rewards": ["math_answer", "format"]}
    sizes = {"steps": of or steps, "prompts_per_step": PROMPTS, "group_size": GROUP}
    (folder / "config.yaml").write_text(Config.parse({**least, **sizes, **changes}).resolve().to_yaml())
    log = made_log(folder, of or steps)
    log.evaluation(0, made_scores(log.chat, [True, False, False, True]))
    for step in range(1, steps + 1):
        grow(log, step)
    log.evaluation(steps, made_scores(log.chat, [True, True, True, False]))
    return folder


def made_log(folder: Path, steps: int) -> RunLog:
    return RunLog(folder, steps=steps, headline="math_answer", chat=made_chat(), console=Console(quiet=True))


def grow(log: RunLog, step: int) -> None:
    """One more step of a run."""
    log.lap("sample")
    log.lap("update")
    log.step(step - 1, made_step(log.chat, step), [{"loss": 1 / step, "grad_norm": 0.3 + 0.01 * step}])


def long_run(folder: Path, *, steps: int, prompts: int, group_size: int, tokens: int) -> Path:
    """A run of many steps whose completions are those of its first four, again and again."""
    made_run(folder, steps=0, of=steps, prompts_per_step=prompts, group_size=group_size)
    log, numbers = made_log(folder, steps), np.random.default_rng(0)
    for step in range(1, 5):
        texts = ["".join(map(chr, row)) for row in numbers.integers(97, 123, (prompts * group_size, tokens - 1))]
        rollouts = [
            made_rollout(log.chat, f"What is {step} + {i // group_size}?", text, i % 3 == 0, i // group_size)
            for i, text in enumerate(texts)
        ]
        log.step(step - 1, Algorithm().credit(rollouts), [{"loss": 0.1, "grad_norm": 0.3}])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"reward"' in line]
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(5, steps + 1):
            file.write(json.dumps({**records[step % 4], "step": step}) + "\n")
            os.link(folder / f"rollouts/step-{step % 4 + 1:05d}.parquet", folder / f"rollouts/step-{step:05d}.parquet")
    return folder
