"""Where the memories of absent clients lie: on the card while there is room, after that in pinned host memory.

A federation may have more clients than a card has memory for their personal weights. What a client keeps is fetched
when its work first looks at it; for those who take part next, the copy is under way while this round computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..values import Value, bytes_of, mapped, on_device, tensors_in

Memory = dict[str, Any]


class Shelf:
    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room  # bytes of the card that memories may take
        self.taken = 0
        self._sizes: dict[int, int] = {}  # of the memories on the card, by client
        self._coming: dict[int, tuple[Memory, Memory]] = {}  # as they lie there, and as they will be on the card
        self._stream = torch.cuda.Stream(device, priority=-1)  # of the others, the 33rd would be the first lane's

    def put(self, memories: Mapping[int, Memory]) -> dict[int, Memory]:
        """Memories after their clients' work, each where it will lie."""
        placed = {client: self._place(client, memory) for client, memory in memories.items()}
        if any(placed[client] is not memory for client, memory in memories.items()):
            torch.cuda.current_stream(self.device).synchronize()  # whoever saves them reads them on the host
        return placed

    def _place(self, client: int, memory: Memory) -> Memory:
        size = bytes_of(memory)
        self.taken += size - self._sizes.pop(client, 0)
        if self.taken <= self.room:
            self._sizes[client] = size
            return memory
        self.taken -= size
        return mapped(memory, _pinned)

    def expect(self, memories: Mapping[int, Memory]) -> None:
        """Starts to fetch what will be asked for next."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # for what last lay where the copies go
        with torch.cuda.stream(self._stream), contextlib.suppress(torch.OutOfMemoryError):  # then nothing is ahead
            self._coming = {}
            self._coming = {c: (m, on_device(m, self.device)) for c, m in memories.items() if _away(m)}

    def get(self, client: int, memory: Memory) -> Memory:
        """A memory on the card."""
        away, here = self._coming.pop(client, (None, None))
        if here is None or away is not memory:
            return on_device(memory, self.device)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return here


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _away(memory: Value) -> bool:
    return any(not tensor.is_cuda for _, tensor in tensors_in(memory))
