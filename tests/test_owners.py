"""Sums over clients that own different entries, on a space whose smallest arch lies inside its largest."""

from __future__ import annotations

import torch

from fedtailor.owners import add_means, where_owned
from fedtailor.spaces.base import Arch, Weights, tensor_at
from fedtailor.spaces.tiny import Tiny

SPACE = Tiny((1, 8, 8), 3)
SMALL, LARGE = SPACE.smallest, SPACE.largest
WEIGHTS = SPACE.new_weights(0)


def full(arch: Arch, value: float) -> Weights:
    """What a client of the arch sends where every entry is one value."""
    return {n: torch.full_like(t, value) for n, t in SPACE.cut(WEIGHTS, arch).items()}


def with_small(inside: float, outside: float) -> Weights:
    """One value in the entries of the smallest arch, another in the rest."""
    found = {n: torch.full_like(t, outside) for n, t in WEIGHTS.items()}
    for name, at in SPACE.index(SMALL).items():
        tensor_at(found[name], at).fill_(inside)
    return found


def test_means_are_over_all_owners_of_an_entry_present_or_not() -> None:
    zero = with_small(0, 0)
    found = add_means(SPACE, zero, [(full(SMALL, 2.0), SMALL), (full(LARGE, 1.0), LARGE)], [SMALL, SMALL, LARGE])
    expected = with_small(1, 1)  # (2 + 1) / 3 where all three own, 1 / 1 where one does
    assert all(torch.allclose(found[n], t) for n, t in expected.items())
    alone = add_means(SPACE, zero, [(full(LARGE, 3.0), LARGE)], [SMALL, SMALL, LARGE])
    assert all(torch.allclose(alone[n], t) for n, t in with_small(1, 3).items())
    assert not any(t.any() for t in zero.values())


def test_entries_that_nobody_owns_stay() -> None:
    found = where_owned(SPACE, with_small(0, 0), with_small(5, 5), [SMALL])
    assert all(torch.equal(found[n], t) for n, t in with_small(5, 0).items())
