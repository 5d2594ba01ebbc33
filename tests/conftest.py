"""Every test runs offline, on one thread, and the same way each time."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Read by the libraries when they are imported, so before anything else.
CACHE = tempfile.TemporaryDirectory(prefix="groupwise-tests-")
os.environ["HF_HOME"] = CACHE.name  # a cached data set of an earlier run must not decide a test
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pytest
import torch
from hypothesis import settings
from toys import toy_folder, toy_rows

from groupwise.rewards import workers_end

# The models of the tests are too small to share between threads: one is faster, and sums have one order.
torch.set_num_threads(1)

# Examples are drawn from the test's own name, never from the clock or a database on disk.
settings.register_profile("groupwise", derandomize=True, database=None, deadline=None)
settings.load_profile("groupwise")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global generators start alike in every test, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_nursery() -> Iterator[None]:
    """The runs of a file share the processes that call rewards: to start them takes longer than to train a toy."""
    with workers_end():
        yield


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory, one_nursery: None) -> Path:
    """A folder with the model/ and the rows.jsonl of the toy task, for the tests of a file to read."""
    folder = tmp_path_factory.mktemp("toys")
    toy_folder(folder / "model")
    toy_rows(folder / "rows.jsonl")
    return folder


def pytest_unconfigure() -> None:
    CACHE.cleanup()
