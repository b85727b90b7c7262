"""The same network with 8-bit weights and activations: a quarter of the size, at a price that is measured."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .graph import INPUT, describe, require_onnx

PICTURES = 256  # that tell the range of every activation; more change little
KINDS = ["Conv", "Gemm", "MatMul"]  # what is worth computing in 8 bits


class _Pictures:
    """Hands onnxruntime a client's training pictures, some at a time."""

    def __init__(self, images: np.ndarray) -> None:
        self.batches = iter([{INPUT: images[i : i + 32]} for i in range(0, len(images), 32)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def quantise(model: bytes, images: np.ndarray, about: dict[str, Any]) -> bytes:
    """The network in int8: weights per channel, activations by their range on these pictures of the client."""
    onnx = require_onnx()
    from onnxruntime import quantization as q

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it advises a preparation that an exported network has behind it
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
            source.write_bytes(model)
            q.quantize_static(
                source,
                out,
                _Pictures(images[:PICTURES]),  # type: ignore[arg-type]
                quant_format=q.QuantFormat.QDQ,
                op_types_to_quantize=KINDS,
                per_channel=True,
                # 7-bit weights: processors without VNNI add pairs of products in 16 bits, which 8-bit weights overflow
                reduce_range=True,
                activation_type=q.QuantType.QUInt8,
                weight_type=q.QuantType.QInt8,
            )
            made = onnx.load(out)
    finally:
        logging.disable(before)
    describe(made, about)
    return made.SerializeToString()
