"""How the kernels of this room come to run: their sources lie beside their modules, the card's own compiler makes them.

They are compiled for what is known when they are first needed. Where they do not apply, torch's own operations run;
`plain` asks for those, and so does the environment variable FEDTAILOR_KERNELS=off, for a whole process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cached import read_cached, write_cached

Kernels = Mapping[str, Any]
Argument = Tensor | int | float | ctypes.Structure | None  # of a kernel
HEADERS = {"HALF": "real.cuh", "ACT": "acts.cuh"}  # by the value that asks for them
_here = threading.local()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, networks compute layer after layer as they are written, with torch's own kernels."""
    before, _here.plain = is_plain(), True
    try:
        yield
    finally:
        _here.plain = before


def is_plain() -> bool:
    return getattr(_here, "plain", False)


def applies(*tensors: Tensor | None) -> bool:
    """Whether kernels of ours may run on these: in single precision on a GPU, unless somebody wants it otherwise."""
    return takes(None, *tensors) and not torch.is_autocast_enabled("cuda")


def takes(images: Tensor | None, *tensors: Tensor | None) -> bool:
    """The same of kernels whose images may be in bfloat16 as well, as they are where a step computes in that."""
    if images is not None and images.dtype != torch.bfloat16 and torch.is_autocast_enabled("cuda"):
        return False  # they are about to become bfloat16
    return (
        all(t is None or (t.is_cuda and t.dtype == torch.float32) for t in tensors)
        and (images is None or (images.is_cuda and images.dtype in (torch.float32, torch.bfloat16)))
        and not is_plain()
        and not torch.compiler.is_compiling()
    )


def half(images: Tensor) -> int:
    """HALF, for kernels that take both."""
    return int(images.dtype == torch.bfloat16)


@lru_cache(maxsize=512)
def compiled(name: str, names: tuple[str, ...], device: torch.device, **values: int) -> Kernels | None:
    """The kernels of NAME.cu with some values set; None where this torch cannot compile them.

    They are made in a thread of their own: one that captures a graph is not allowed to load code.
    """
    if os.environ.get("FEDTAILOR_KERNELS") == "off":
        return None
    source = source_of(name, **values)
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_compile, source, names, device).result()


def source_of(name: str, **values: int) -> str:
    """The source of NAME.cu, with what it needs before it."""
    here = Path(__file__)
    needed = [header for key, header in HEADERS.items() if key in values]
    texts = [here.with_name(file).read_text(encoding="utf-8") for file in [*needed, f"{name}.cu"]]
    return "\n".join([*(f"#define {key} {value}" for key, value in values.items()), *texts])


def _compile(source: str, names: tuple[str, ...], device: torch.device) -> Kernels | None:
    try:
        from torch.cuda._utils import _cuda_load_module

        torch.cuda.set_device(device.index or 0)
        made: Any = _cuda_load_module(_binary(source, names[0], device), list(names))
        return made
    except (ImportError, OSError, RuntimeError) as error:  # another torch, or no compiler library beside it
        if "out of memory" in str(error):  # what is found here is remembered, and the next time there may be room
            raise torch.OutOfMemoryError(str(error)) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"fedtailor's kernels cannot be made here, torch's own run instead ({reason})", stacklevel=2)
        return None


def _binary(source: str, name: str, device: torch.device) -> bytes:
    """What the card's compiler makes of a source: up to a second's work, kept for other processes."""
    from torch.cuda._utils import _nvrtc_compile

    made_for = torch.cuda.get_device_capability(device), torch.__version__, torch.version.cuda
    place = f"kernels/{hashlib.sha256(f'{made_for} {source}'.encode()).hexdigest()}"
    found = read_cached(place)
    if found is None:
        found = bytes(_nvrtc_compile(source, name)[0])
        write_cached(place, found)
    return found


def launch(kernel: Any, blocks: tuple[int, int], threads: int, *args: Argument) -> None:
    """Starts a kernel on the current stream of the first argument's device. None is an empty pointer."""
    first = args[0]
    assert isinstance(first, Tensor)
    if not getattr(_here, "launched", False):  # a thread that launches nothing through torch first has no context
        torch.zeros(1, device=first.device)
        _here.launched = True
    cells = [_cell(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(first.get_device()))
    failed = _driver().cuLaunchKernel(kernel.func, *blocks, 1, threads, 1, 1, 0, stream, pointers, None)
    if failed:
        raise RuntimeError(f"CUDA error: a kernel could not be launched (error {failed} of the driver)")


@lru_cache(maxsize=64)
def _table(many: int) -> type[ctypes.Structure]:
    return type("Pointers", (ctypes.Structure,), {"_fields_": [("at", ctypes.c_void_p * many)]})


def addresses(tensors: Sequence[Tensor]) -> ctypes.Structure:
    """Where tensors lie, for a kernel that takes several in one argument."""
    return _table(len(tensors))((ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors]))


def gradients(y: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
    """Gradients that can be differentiated again, of what torch computed in a kernel's place."""
    wanted = [t for t, wants in zip(inputs, needed, strict=True) if wants and t is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(found) if wants else None for wants in needed]


@lru_cache(maxsize=1)
def _driver() -> Any:
    from torch.cuda._utils import _get_gpu_runtime_library

    return _get_gpu_runtime_library()


def _cell(arg: Argument) -> Any:
    if isinstance(arg, ctypes.Structure):
        return arg
    if isinstance(arg, int):
        return ctypes.c_int(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return ctypes.c_void_p(None if arg is None else arg.data_ptr())
