"""Where prompts come from, as settings (`Data`), and the task that they make: one dataset or a mixture of several.

Also what keeps training and evaluation apart: a part held out by a hash, and no prompt on both sides.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

from pydantic import Field, field_validator, model_validator

from groupwise.columns import maker, with_columns
from groupwise.errors import DataError
from groupwise.rewards import Reward
from groupwise.rewards.gym import PREFIX, gym_rows
from groupwise.rows import read_rows
from groupwise.slots import Slot
from groupwise.tasks import LABEL, LongPrompts, Task, check_prompts, normal_form, split_rows

_LOG = logging.getLogger(__name__)


class Dataset(Slot):
    """Rows of one dataset, and the columns made of them."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a dataset id of the Hugging Face hub, or `gym:NAME`, a dataset of
    reasoning-gym."""
    split: str = "train"
    """Which split of a hub dataset; of `gym:NAME`, which draw of puzzles."""
    columns: dict[str, str] = Field(default={})
    """Columns to make: by name, a Jinja template over the row's columns (`{{question}} Think first.`), or the name of a
    column (`reward_model.ground_truth` reaches inside)."""
    options: dict[str, Any] = Field(default={})
    """Settings of `gym:NAME`, such as `{max_terms: 3}`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many rows from the start; of `gym:NAME`, how many to make (null: 1000)."""

    @field_validator("columns")
    @classmethod
    def _readable(cls, columns: dict[str, str]) -> dict[str, str]:
        for name, text in columns.items():
            maker(text, name)
        return columns


class Portion(Dataset):
    """One dataset of a mixture."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the prompts, relative to the other weights."""
    name: str = ""
    """What its rows have in the column `dataset`; empty: its path."""


class Data(Dataset):
    """Where the prompts come from."""

    path: str = ""
    """A .jsonl, .json, .csv or .parquet file, a dataset id of the Hugging Face hub, or `gym:NAME`, a dataset of
    reasoning-gym."""
    mixture: tuple[Portion, ...] = Field(default=(), strict=False)
    """Several datasets in place of one, each drawn as often as its `weight` says, through epochs of its own."""
    prompt_column: str = "prompt"
    """The column with the prompt: a string, or chat messages."""
    system_prompt: str | None = None
    """Put before every conversation that does not bring its own."""
    long_prompts: LongPrompts = "error"
    """What to do with prompts that leave no room for `sampling.max_tokens` in the model's context; `truncate-left`
    keeps their end."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Data:
        if not self.path and not self.mixture:
            raise ValueError("names no rows; set path: a file or a hub id, or mixture: a list of datasets, each a path")
        plain = Dataset(path="")
        idle = [name for name in Dataset.model_fields if getattr(self, name) != getattr(plain, name)]
        if self.mixture and idle:
            raise ValueError(
                f"{', '.join(idle)} beside mixture would have no effect; write it in the mixture's datasets"
            )
        names = [portion.name or portion.path for portion in self.mixture]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"mixture has two datasets called {twice}; give one of them another `name`")
        return self


def load_task(data: Data, rewards: tuple[Reward, ...]) -> Task:
    """The rows that the settings name, with their columns made, and the rewards.

    Raises:
        DataError: a dataset cannot be read, or a row lacks what a column is made of.
        ConfigError: a template of `columns` is not Jinja.
    """
    mixture: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for place, portion in enumerate(data.mixture):
        name = portion.name or portion.path
        mixture[name] = portion.weight
        rows += [{**row, LABEL: name} for row in _rows(portion, f"data.mixture[{place}]")]
    rows = rows if data.mixture else _rows(data, "data")
    return Task(rows, rewards, prompt=data.prompt_column, system=data.system_prompt, mixture=mixture)


def _rows(dataset: Dataset, where: str) -> list[dict[str, Any]]:
    try:
        rows = _read(dataset)
    except DataError as error:  # which says it of `data`
        raise DataError(str(error).replace("data.", f"{where}.", 1)) from error
    return with_columns(rows, dataset.columns, f"{where}.columns") if dataset.columns else rows


def _read(dataset: Dataset) -> list[dict[str, Any]]:
    if dataset.path.startswith(PREFIX):
        return gym_rows(dataset.path.removeprefix(PREFIX), dataset.split, dataset.options, dataset.limit)
    if dataset.options:
        raise DataError(
            f"data.options: only {PREFIX}NAME has options, and the path here is {dataset.path}; take them out"
        )
    return read_rows(dataset.path, split=dataset.split, limit=dataset.limit)


def hold_out(task: Task, fraction: float) -> tuple[Task, Task]:
    """(training, held out): `fraction` of the prompts is held out, by a hash of each (`split_rows`).

    Raises:
        DataError: see `check_prompts`; or a side would be empty.
    """
    check_prompts(task)
    train, test = split_rows(task.rows, fraction, task.prompt_of)
    if not train or not test:
        raise DataError(
            f"evaluation.fraction: {fraction} of {len(task.rows)} rows leaves {len(train)} to train on and {len(test)} "
            "to evaluate on; set another fraction, or name held-out rows in evaluation.data"
        )
    return dataclasses.replace(task, rows=train), dataclasses.replace(task, rows=test, mixture={})


def without_held_out(task: Task, held_out: Task) -> Task:
    """The task without the prompts that are held out, told apart by `normal_form`; what is left out is said.

    When no prompt would be left, evaluating on the training prompts is meant, and nothing is left out.
    """
    kept_back = {normal_form(held_out.prompt_of(row)) for row in held_out.rows}
    double = [index for index, row in enumerate(task.rows) if normal_form(task.prompt_of(row)) in kept_back]
    if not double:
        return task
    example = normal_form(task.prompt_of(task.rows[double[0]]))[:60]
    found = f"data: {len(double)} of {len(task.rows)} prompts are held out, too, such as rows[{double[0]}] {example!r}"
    if len(double) == len(task.rows):
        _LOG.warning("%s; evaluations will tell how well they were learned, not how well others are answered", found)
        return task
    _LOG.warning("%s; left out of the training", found)
    both = set(double)
    return dataclasses.replace(task, rows=[row for index, row in enumerate(task.rows) if index not in both])
