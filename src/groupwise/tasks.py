"""A task: rows, the prompt made of each, and the rewards; how rows are checked, ordered and split.

Whatever is wrong with a dataset is found here, before the first token is sampled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, cast

import numpy as np

from groupwise.chat import Chat, Prompt
from groupwise.errors import DataError, Findings, did_you_mean
from groupwise.rewards import Reward, check_rewards
from groupwise.seeding import generator, key
from groupwise.slots import replace

Row = Mapping[str, Any]
LABEL = "dataset"
"""The column that says which dataset of a mixture a row is from."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Task:
    """What a model is asked, and how its answers are graded."""

    rows: Sequence[Row]
    rewards: tuple[Reward, ...]
    """See `groupwise.rewards.as_rewards`."""
    prompt: str | Callable[[Row], Prompt] = "prompt"
    """The column with the prompt, or a function from a row to the prompt: text, or a list of messages."""
    system: str | None = None
    """A system message before each prompt that has none of its own.  With one, a prompt that is text becomes the
    user's message; the empty string does only that."""
    longest_prompt: int | None = None
    """Of a prompt with more tokens, only the last so many are asked; see `Chat.prompt`."""
    mixture: Mapping[str, float] = field(default_factory=dict[str, float])
    """How often each dataset is drawn, by what its rows have in the column `dataset`; empty: there is only one."""

    def prompt_of(self, row: Row) -> Prompt:
        """The prompt of a row of this task that has passed `check_prompts`."""
        asked = row[self.prompt] if isinstance(self.prompt, str) else self.prompt(row)
        if self.system is None:
            return asked
        spoken = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        keeps = not self.system or spoken[0]["role"] == "system"
        return spoken if keeps else [{"role": "system", "content": self.system}, *spoken]

    def rows_for_step(self, step: int, prompts_per_step: int, seed: int) -> list[int]:
        """Which rows step `step` (from 0) uses: `rows_for_step`, or `mixed_rows_for_step` of a mixture."""
        if not self.mixture:
            return rows_for_step(len(self.rows), step, prompts_per_step, seed)
        return mixed_rows_for_step(self._datasets, self.mixture, step, prompts_per_step, seed)

    @cached_property
    def _datasets(self) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = {name: [] for name in self.mixture}
        for index, row in enumerate(self.rows):
            found[row[LABEL]].append(index)
        return found


LongPrompts = Literal["error", "drop", "truncate-left"]
"""What to do with a prompt that leaves no room for the longest completion; `truncate-left` keeps its end."""


def check_task(
    task: Task, chat: Chat | None, *, max_tokens: int, context: int | None, long_prompts: LongPrompts = "error"
) -> Task:
    """The task, once everything that can be known to be wrong with it has been looked for.

    Args:
        chat: the tokenizer; None when the model cannot be read, and then no prompt is measured.
        max_tokens: the longest completion.
        context: how many tokens of prompt and completion the model can take; None: no limit.
        long_prompts: what to do with a prompt that leaves no room for the longest completion.

    Raises:
        GroupwiseError: every problem of these: DataError, no rows, no prompt column, a prompt that is not text or
            messages, or one that is too long; ModelError, the chat template cannot lay out the messages; RewardError,
            see `check_rewards`.
    """
    findings, rewards = Findings(), [replace(reward, trial=False) for reward in task.rewards]
    with findings:
        check_prompts(task)
        rewards = task.rewards  # a trial needs a prompt
    for reward in rewards if task.rows else ():
        with findings:
            check_rewards((reward,), task.rows, task.prompt_of)
    if chat is not None and rewards is task.rewards:
        with findings:
            task = check_lengths(task, chat, max_tokens=max_tokens, context=context, long_prompts=long_prompts)
    findings.settle()
    return task


def check_lengths(
    task: Task, chat: Chat, *, max_tokens: int, context: int | None, long_prompts: LongPrompts = "error"
) -> Task:
    """The task without the prompts that leave no room for `max_tokens`, or with their ends; see `check_task`.

    Raises:
        DataError: a prompt has no tokens, or is too long.
        ModelError: the chat template cannot lay out the messages.
    """
    lengths = [len(chat.prompt(task.prompt_of(row))) for row in task.rows]
    if 0 in lengths:
        raise DataError(
            f"data: the prompt of rows[{lengths.index(0)}] has no tokens; write a prompt, or leave that row out"
        )
    room = max(lengths) if context is None else context - max_tokens
    long = [index for index, length in enumerate(lengths) if length > room]
    if not long:
        return task
    found = (
        f"data.long_prompts: {len(long)} of {len(lengths)} prompts are too long: rows[{long[0]}] has "
        f"{lengths[long[0]]} tokens, and with sampling.max_tokens {max_tokens} passes the model's context of {context}"
    )
    kept = [row for row, length in zip(task.rows, lengths, strict=True) if length <= room]
    remedies = {"drop": bool(kept), "truncate-left": room > 0}
    if not remedies.get(long_prompts, False):
        others = [name for name, helps in remedies.items() if helps]
        accepted = f", or set data.long_prompts: {' or '.join(others)}" if others else ""
        raise DataError(
            f"{found}; shorten them, lower sampling.max_tokens, take a model with a longer context{accepted}"
        )
    if long_prompts == "drop":
        _LOG.warning("%s; dropped", found)
        return dataclasses.replace(task, rows=kept)
    _LOG.warning("%s; cut to their last %d tokens", found, room)
    return dataclasses.replace(task, longest_prompt=room)


def check_prompts(task: Task) -> None:
    """Make sure that every row has a prompt of text or messages.

    Raises:
        DataError: naming the first row that has not, what it has, what is accepted, and how many others there are.
    """
    if not task.rows:
        raise DataError("data: there are no rows; accepted: at least one row with a prompt")
    column = task.prompt
    lacking = [index for index, row in enumerate(task.rows) if isinstance(column, str) and column not in row]
    if lacking and isinstance(column, str):
        row = task.rows[lacking[0]]
        raise DataError(
            f"data.prompt_column: rows[{lacking[0]}]{_and_others(lacking)} has no column {column!r}"
            f"{did_you_mean(column, row)}; columns: {', '.join(row)}; rename one of them, or set data.prompt_column"
        )
    problems = {
        index: problem
        for index, row in enumerate(task.rows)
        if (problem := _problem(row[column] if isinstance(column, str) else column(row)))
    }
    if problems:
        index, problem = next(iter(problems.items()))
        raise DataError(
            f"data: the prompt of rows[{index}]{_and_others(problems)} {problem}; accepted: text, or a list of "
            'messages {"role": "user", "content": "..."}; mend that row or leave it out'
        )


def _and_others(rows: Sized) -> str:
    return f" (the first of {len(rows)} such rows)" if len(rows) > 1 else ""


def _problem(prompt: object) -> str:
    if prompt is None:
        return "is null"
    if isinstance(prompt, str):
        return "" if prompt.strip() else "is empty"
    if not isinstance(prompt, list | tuple):
        return f"is the {type(prompt).__name__} {prompt!r}"
    messages = cast(Sequence[object], prompt)
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"has, as message {place}, the {type(message).__name__} {message!r}"
        for name in ("role", "content"):
            if not isinstance(cast(Row, message).get(name), str):
                return f"has no text as the {name!r} of message {place}: {dict(cast(Row, message))!r}"
    return "" if messages else "is an empty list"


def rows_for_step(count: int, step: int, prompts_per_step: int, seed: int) -> list[int]:
    """Which of `count` rows step `step` (from 0) uses: int[prompts_per_step], a pure function of its arguments.

    Every epoch is a new permutation of all rows, and a step may straddle two epochs: no row is ever left out.

    Raises:
        DataError: there are fewer rows than one step needs.
    """
    if count < prompts_per_step:
        raise DataError(
            f"data: {count} rows cannot fill a step of prompts_per_step {prompts_per_step}; "
            f"set prompts_per_step to at most {count}, or add rows"
        )
    first = step * prompts_per_step
    return _through_epochs(count, range(first, first + prompts_per_step), seed)


def _through_epochs(count: int, places: range, seed: int, *stream: str) -> list[int]:
    """Which of `count` rows stand at these places of one epoch after the other."""
    epochs = {place // count for place in places}
    orders = {epoch: generator(seed, "order", *stream, epoch).permutation(count) for epoch in epochs}
    return [int(orders[place // count][place % count]) for place in places]


def mixed_rows_for_step(
    datasets: Mapping[str, Sequence[int]], weights: Mapping[str, float], step: int, prompts_per_step: int, seed: int
) -> list[int]:
    """Which rows step `step` (from 0) of a mixture uses: int[prompts_per_step], a pure function of its arguments.

    Each prompt's dataset is drawn by weight, and each dataset goes through epochs of its own: no row of it comes twice
    before all have come once.  A step may hold a prompt twice when its dataset is smaller than its share of the step.

    Args:
        datasets: the rows of each dataset, by its name.
        weights: relative to each other, by the same names.

    Raises:
        DataError: a dataset has no rows.
    """
    for name, rows in datasets.items():
        if not rows:
            raise DataError(
                f"data.mixture: no row of {name} is left to train on; take it out of the mixture, or add rows"
            )
    names, first = list(weights), step * prompts_per_step
    edges = np.cumsum([weights[name] for name in names]) / sum(weights.values())
    # The stream is one for the whole run, so that how often a dataset came before this step follows from its beginning.
    draws = np.searchsorted(edges[:-1], generator(seed, "mixture").random(first + prompts_per_step), side="right")
    chosen = np.empty(prompts_per_step, dtype=np.int64)
    for number, name in enumerate(names):
        before, now = int((draws[:first] == number).sum()), draws[first:] == number
        places = _through_epochs(len(datasets[name]), range(before, before + int(now.sum())), seed, name)
        chosen[now] = [datasets[name][place] for place in places]
    return chosen.tolist()


def normal_form(prompt: Prompt) -> str:
    """The words of a prompt, but for its system message, without differences of case and spacing.

    It is equal for prompts that ask the same.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = [message for message in messages if message["role"] != "system"] or messages
    return " ".join(" ".join(message["content"] for message in asked).split()).casefold()


def split_rows(
    rows: Sequence[Row], test_fraction: float, prompt_of: Callable[[Row], Prompt] = itemgetter("prompt")
) -> tuple[list[Row], list[Row]]:
    """(train, test) by a hash of each row's prompt, so that a row stays on its side whatever is added around it.

    Rows whose prompts have the same `normal_form` are on the same side: nothing of the test is ever trained on.
    """
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        chance = key("split", normal_form(prompt_of(row))) / 2**64
        sides[chance < test_fraction].append(row)
    return sides
