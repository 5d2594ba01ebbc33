"""Randomness as a pure function of (seed, purpose, step, group, sample).

There is no generator whose state would have to be saved: resuming is exact, and streams with different
purposes cannot collide.  Keys are hashed, never added, so neighbouring seeds share nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def key(*parts: int | str) -> int:
    """A 64-bit key for a tuple of integers and strings; the same on every machine and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator of the stream named by `parts`."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))


def uniforms(sample_key: int, count: int) -> NDArray[np.float64]:
    """float64[count] in [0, 1): one draw per token of the completion with this key."""
    return np.random.Generator(np.random.Philox(key=sample_key)).random(count)
