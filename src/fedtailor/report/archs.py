"""Architectures as they are written in tables."""

from __future__ import annotations


def parse(text: str, sizes: list[int]) -> tuple[int, ...] | None:
    """'1-0-2' as (1, 0, 2), or None where it is no point of the space."""
    try:
        arch = tuple(int(choice) for choice in text.split("-"))
    except ValueError:
        return None
    fits = len(arch) == len(sizes) and all(0 <= choice < size for choice, size in zip(arch, sizes, strict=True))
    return arch if fits else None
