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


_MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd 64-bit constants, as signed integers


def hash_bits(counter: torch.Tensor) -> torch.Tensor:
    """Mixes int64 counters into 62 well-spread bits (an xor-shift-multiply finaliser).

    Pure integer arithmetic: the same numbers on every device and inside a captured graph.
    """
    x = counter * _MIX1
    x = (x ^ (x >> 32)) * _MIX2
    x = (x ^ (x >> 29)) * _MIX1
    return (x ^ (x >> 32)) & ((1 << 62) - 1)


def uniform(seed: torch.Tensor, *shape: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) of the given shape for every seed of an int64 tensor (one seed: just that shape)."""
    count = int(np.prod(shape)) if shape else 1
    index = torch.arange(count, device=seed.device, dtype=torch.int64)
    bits = hash_bits(hash_bits(seed)[..., None] + index)
    return ((bits >> 38).to(torch.float32) / (1 << 24)).reshape(*seed.shape, *shape)
