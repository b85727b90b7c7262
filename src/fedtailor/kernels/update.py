"""The end of a training step with SGD, all parameters in one kernel, or in two where gradients are clipped.

A network has hundreds of small tensors. Pulling, pushing, clipping and moving them one operation after another costs a
launch for every few dozen of them, and reads all of them again and again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .compiling import Kernels, compiled, launch, takes

THREADS = 256
CHUNK = 2048  # entries that a block of threads takes
BLOCKS = 512  # the most parts that the sum of squares comes in, each of which every block reads
NAMES = ("squares", "update")


class Update:
    """SGD for weights whose gradients are added to, clipped and used up, without being changed themselves.

    To the gradient of the loss, `pull * (weight - anchor)` and `push` are added where there are such. The norm over all
    parameters is then at most `clip`, where that is not 0. The rate and the pull are read on the device.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[Tensor],
        lr: Tensor,
        pull: Tensor,
        others: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        numbers: tuple[float, float, float],
    ) -> None:
        self.kernels, self.weights, self.lr, self.pull, self.others = kernels, weights, lr, pull, others
        self.clip, self.momentum, self.decay = map(float, numbers)
        pieces = _pieces([w.numel() for w in weights])
        self.blocks = len(pieces)
        self.pieces = torch.from_numpy(pieces).to(lr.device, non_blocking=True)
        self.rows = torch.zeros(len(weights), 5, dtype=torch.int64, device=lr.device)  # as update.cu describes them
        self.parts = torch.zeros(min(BLOCKS, self.blocks) if self.clip else 0, device=lr.device)
        self._found: list[list[int]] = []  # what the rows have to be

    @classmethod
    def of(
        cls,
        weights: Sequence[Tensor],
        lr: Tensor,
        *,
        momenta: Sequence[Tensor] = (),
        anchors: Sequence[Tensor] = (),
        pull: Tensor,
        pushes: Sequence[Tensor] = (),
        clip: float,
        momentum: float,
        decay: float,
    ) -> Update | None:
        """None where no kernel of ours can do it."""
        everything = [*weights, *momenta, *anchors, *pushes, lr, pull]
        if not takes(None, *everything) or len({t.device for t in everything}) > 1:
            return None
        if not any(w.numel() for w in weights) or any(w.numel() > 2**30 or not _dense(w) for w in weights):
            return None
        for some in (momenta, anchors, pushes):
            if some and [_lies(t) for t in some] != [_lies(w) for w in weights]:
                return None
        how = {"ANCHORED": int(bool(anchors)), "PUSHED": int(bool(pushes)), "MOMENTUM": int(bool(momenta))}
        kernels = compiled("update", NAMES, lr.device, T=THREADS, CHUNK=CHUNK, **how)
        if kernels is None:
            return None
        return cls(kernels, weights, lr, pull, (momenta, anchors, pushes), (clip, momentum, decay))

    def step(self) -> None:
        """Moves the weights. In a capture it is recorded, and `settle` has to follow before the first replay."""
        gradients = [_along(w) for w in self.weights]  # some are copies, which live as long as this
        self._found = self._rows(gradients)
        if not (self.rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settle()
        tables = self.rows, self.pieces, self.pull, self.parts
        parts = len(self.parts)
        if parts:
            launch(self.kernels["squares"], (parts, 1), THREADS, *tables, self.blocks)
        numbers = self.clip, self.momentum, self.decay
        launch(self.kernels["update"], (self.blocks, 1), THREADS, *tables, self.lr, parts, *numbers)

    def settle(self) -> None:
        """Tells the kernels where the last step's tensors lie. Recorded, the copy would be made in every replay."""
        if self._found:
            found = torch.tensor(self._found, pin_memory=self.rows.is_cuda)  # nobody waits for what the card is doing
            self.rows.copy_(found, non_blocking=True)
        self._found = []

    def _rows(self, gradients: Sequence[Tensor | None]) -> list[list[int]]:
        """What has no gradient stays as it is, unless something is added to gradients."""
        momenta, anchors, pushes = (some or [None] * len(self.weights) for some in self.others)
        adds = any(self.others[1:])
        rows: list[list[int]] = []
        for w, m, g, *added in zip(self.weights, momenta, gradients, anchors, pushes, strict=True):
            there = [w, m, g, *added] if adds or g is not None else [None] * 5
            rows.append([0 if t is None else t.data_ptr() for t in there])
        return rows


def _pieces(counts: Sequence[int]) -> np.ndarray:
    """The row, the first entry and the end of every piece."""
    many = -(-np.array(counts, dtype=np.int64) // CHUNK)
    rows = np.repeat(np.arange(len(counts)), many)
    begins = (np.arange(len(rows)) - np.repeat(np.cumsum(many) - many, many)) * CHUNK
    ends = np.minimum(begins + CHUNK, np.array(counts, dtype=np.int64)[rows])
    return np.column_stack([rows, begins, ends]).astype(np.int32)


def _along(weight: Tensor) -> Tensor | None:
    """The gradient of a weight, its entries in the same order."""
    gradient = weight.grad
    if gradient is None or _lies(gradient) == _lies(weight):
        return gradient
    return torch.empty_like(weight).copy_(gradient)


def _lies(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and steps of the axes that have an order: tensors in which these are equal can be walked along together."""
    return [axis for axis in zip(tensor.shape, tensor.stride(), strict=True) if axis[0] > 1]


def _dense(tensor: Tensor) -> bool:
    """Whether its entries fill one piece of memory."""
    expected = 1
    for size, stride in sorted(_lies(tensor), key=lambda axis: axis[1]):
        if stride != expected:
            return False
        expected *= size
    return True
