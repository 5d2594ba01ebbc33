"""Reward functions after the examples of TRL's documentation (GRPO trainer, "Using a custom reward function").

Every signature of that page, in words of our own: none of them knows groupwise.  Workers import this file.
"""

import asyncio
import re


def longer_in_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def longer_in_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def has_the_format(completions, **kwargs):
    said = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in said]


def equals_the_reference(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if m and m.group(1) == truth else 0.0 for m, truth in zip(found, ground_truth)]  # noqa: B905


def of_mathematics(prompts, completions, task, **kwargs):
    return [(1.0 if "4" in said else -1.0) if of == "math" else None for said, of in zip(completions, task)]  # noqa: B905


def of_code(prompts, completions, task, **kwargs):
    return [(1.0 if "def" in said else -1.0) if of == "coding" else None for said, of in zip(completions, task)]  # noqa: B905


async def asks_a_server(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def logs_more(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    right = [1.0 if said == truth else 0.0 for said, truth in zip(completions, ground_truth)]  # noqa: B905
    if log_extra:
        log_extra("truth", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return right
