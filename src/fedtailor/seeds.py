"""Randomness by counter: every draw is named by what it is for, never by what was drawn before it.

A key such as (seed, "batches", round, client) is hashed to the state of its own generator, so the numbers of a run do
not depend on the order in which clients are executed, on threads, or on Python's hash seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import torch

Key = int | str


def seed_of(*key: Key) -> int:
    """A 63-bit seed for the key (fits a signed int64 tensor)."""
    digest = hashlib.blake2b("\x1f".join(f"{type(k).__name__}:{k}" for k in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rng_of(*key: Key) -> np.random.Generator:
    """A NumPy generator for the key."""
    return np.random.Generator(np.random.Philox(seed_of(*key)))


_global_generator = threading.RLock()


@contextlib.contextmanager
def torch_seed(*key: Key) -> Iterator[None]:
    """Runs the block with torch's global CPU generator seeded for the key, then puts the generator back.

    The generator is one for all threads, so only one block at a time has it.
    """
    with _global_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(*key))
        yield
