"""Runs the GPU kernels' sources on a processor, through the compiler of this machine."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.kernels import compiling

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++20", "-w", "-fPIC", "-fno-gnu-unique"]  # each library has shared memory of its own
_built = Path(tempfile.mkdtemp(prefix="kernels-"))


@lru_cache
def headers() -> Path:
    """A folder with the header, compiled once for all kernels."""
    shutil.copy(HERE / "cuda_on_cpu.h", _built)
    subprocess.run([str(COMPILER), *FLAGS, "-x", "c++-header", str(_built / "cuda_on_cpu.h")], check=True)
    return _built


@lru_cache
def compiled(name: str, names: tuple[str, ...], device: torch.device, **values: int) -> dict[str, Any]:
    """The kernels of NAME.cu as functions of a library."""
    assert device.type == "cpu"
    source = compiling.source_of(name, **values)
    shared = r"__shared__ (?:alignas\(16\) )?float (\w+)\[([^\]]*)\];"
    source = re.sub(shared, r"static float* \1 = poisoned(\2);", source)
    parts = ['#include "cuda_on_cpu.h"', source]
    for kernel in names:
        found = re.search(rf"\b{kernel}\(([^)]*)\) {{", source)
        assert found, f"{name}.cu has no kernel {kernel}"
        given = ", ".join(re.sub(r"\s+", " ", found[1]).split(", "))
        passed = ", ".join(re.findall(r"(\w+)(?:,|$)", given))
        call = f"run(width, height, T, [&] {{ {kernel}({passed}); }});"
        parts.append(f'extern "C" void go_{kernel}(int width, int height, {given}) {{ {call} }}')
    text = "\n".join(parts)
    library = _built / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    (code := library.with_suffix(".cpp")).write_text(text, encoding="utf-8")
    subprocess.run([str(COMPILER), *FLAGS, "-shared", f"-I{headers()}", "-o", str(library), str(code)], check=True)
    loaded = ctypes.CDLL(str(library))
    return {kernel: getattr(loaded, f"go_{kernel}") for kernel in names}


def launch(kernel: Any, blocks: tuple[int, int], threads: int, *args: compiling.Argument) -> None:
    kernel(*map(ctypes.c_int, blocks), *(compiling._cell(arg) for arg in args))


def applies(*tensors: Tensor | None) -> bool:
    return not compiling.is_plain() and not any(t is not None and t.is_meta for t in tensors)  # networks are counted so


def takes(images: Tensor | None, *tensors: Tensor | None) -> bool:
    return applies(images, *tensors)


def require_what_torch_computes(compute: Callable[[], Sequence[Tensor]], rtol: float, atol: float) -> None:
    """Whether what kernels of ours compute is what torch computes in their place."""
    ours = compute()
    with compiling.plain():
        theirs = compute()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)
