"""A client's network made portable: bytes of pictures in, class probabilities out, everything between in one graph."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import normalisation
from ..engine.local import ready
from ..errors import UserError
from ..seeds import torch_seed
from ..spaces.base import Arch, Space, Weights
from ..spaces.measure import tensors_of

if TYPE_CHECKING:
    from onnx import ModelProto

KEY = "fedtailor"  # of the description in the file's metadata
INPUT, OUTPUT = "images", "probabilities"
OPSET = 17
BATCH = 256


class Portable(nn.Module):
    """uint8 pictures [batch, height, width, channels] to probabilities [batch, classes]."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, data: str, channels: int) -> None:
        super().__init__()
        self.net = net
        mean, std = normalisation(data, channels)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).to(torch.float32)
        return self.net((x / 255 - self.mean) / self.std).softmax(1)

    @torch.no_grad()
    def run(self, images: np.ndarray) -> np.ndarray:
        """Probabilities of many pictures, some at a time."""
        parts = [self(torch.from_numpy(images[i : i + BATCH])) for i in range(0, len(images), BATCH)]
        return torch.cat(parts).numpy()


def network(space: Space, arch: Arch, weights: Weights) -> nn.Module:
    """The network that a run saved. Tensors that `build` makes in another size, or not at all, become its buffers: a
    personal model may hold more than weights, for example pictures' features to compare with."""
    with torch_seed("template"):
        net = ready(space.build(arch))
    own = tensors_of(net)
    missing = sorted(own.keys() - weights.keys())
    if missing:
        raise UserError(f"the saved network has no tensor '{missing[0]}', which '{space.name}' needs for {arch}.")
    for name, value in weights.items():
        if name in own and own[name].shape == value.shape:
            own[name].data.copy_(value)
        else:
            where, _, last = name.rpartition(".")
            net.get_submodule(where).register_buffer(last, value)
    return net.eval()


def to_onnx(whole: Portable, shape: tuple[int, int, int], about: dict[str, Any]) -> bytes:
    """The ONNX file, with its description inside. The number of pictures at a time is left open."""
    onnx = require_onnx()
    channels, height, width = shape
    example = torch.zeros(2, height, width, channels, dtype=torch.uint8)
    with _quiet():
        try:
            data = _traced(whole, example)
        except Exception as first:  # an operator that tracing lacks, or a torch without this exporter
            try:
                data = _captured(whole, example)  # takes ten times as long
            except Exception as second:
                raise UserError(
                    f"this network cannot become an ONNX file. Tracing it: {_reason(first)}. Capturing it: "
                    f"{_reason(second)}. Its forward pass may use operators that ONNX has not; --format torch may work."
                ) from second
    model = onnx.load_from_string(data)
    describe(model, about)
    return model.SerializeToString()


def to_torch(whole: Portable, shape: tuple[int, int, int], about: dict[str, Any]) -> bytes:
    """The same as a torch.export program, which PyTorch loads without fedtailor."""
    channels, height, width = shape
    example = torch.zeros(2, height, width, channels, dtype=torch.uint8)
    out = io.BytesIO()
    with _quiet():
        program = torch.export.export(whole, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        torch.export.save(program, out, extra_files={f"{KEY}.json": json.dumps(about)})
    return out.getvalue()


def describe(model: ModelProto, about: dict[str, Any]) -> None:
    """Writes the description into the model's metadata, in place of one that is there."""
    kept = [entry for entry in model.metadata_props if entry.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(about)


def require_onnx() -> Any:
    try:
        import onnx
        import onnxruntime  # noqa: F401 - the file is checked with it
    except ImportError as error:
        raise UserError(f"this needs onnx and onnxruntime ({error}): pip install 'fedtailor[onnx]'") from None
    return onnx


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def _traced(whole: Portable, example: Tensor) -> bytes:
    out = io.BytesIO()
    torch.onnx.export(
        whole,
        (example,),
        out,  # type: ignore[arg-type]
        dynamo=False,
        opset_version=OPSET,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_axes={INPUT: {0: "batch"}, OUTPUT: {0: "batch"}},
    )
    return out.getvalue()


def _captured(whole: Portable, example: Tensor) -> bytes:
    program = torch.onnx.export(
        whole,
        (example,),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim.AUTO},),
        verbose=False,
    )
    assert program is not None
    return program.model_proto.SerializeToString()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of what does not concern a user: their own future, packages that are not there."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
