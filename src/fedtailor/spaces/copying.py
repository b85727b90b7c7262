"""Networks without first weights, for those who bring their own: made by copying blocks that were built before.

Building a network of a few hundred modules takes as long as a dozen of its training steps. Archs share most of their
blocks, and a copy of a block costs a fifth of another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[Any], nn.Module]
_here = threading.local()  # `device`: where networks without weights are built just now
_BUILDING = threading.Lock()
_OWN = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, (dict, set)))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


@contextlib.contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Networks that this thread builds inside leave their weights as the memory was; other threads draw theirs."""
    names = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]
    builder = threading.get_ident()

    def spared(draw: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if threading.get_ident() == builder else draw(tensor, *args, **kwargs)

        return fill

    with _BUILDING:  # who restores torch's functions must have replaced them
        kept = {n: getattr(nn.init, n) for n in names}
        _here.device = device
        try:
            for name, draw in kept.items():
                setattr(nn.init, name, spared(draw))
            yield
        finally:
            _here.device = None
            for name, draw in kept.items():
                setattr(nn.init, name, draw)


def move_undrawn(net: nn.Module, device: torch.device) -> None:
    """Moves a network that was built without weights; what its parameters hold is not worth the way."""
    for parameter in net.parameters():
        if parameter.device.type != device.type:
            parameter.data = torch.empty_like(parameter, device=device)
    net.to(device)


@contextlib.contextmanager
def never_copied() -> Iterator[None]:
    """Inside, blocks are built and not copied, also while a network is built: for those who count them elsewhere."""
    device, _here.device = getattr(_here, "device", None), None
    try:
        yield
    finally:
        _here.device = device


def remembered(build: Build) -> Build:
    """The `build` of a block; where no weights are drawn, it returns a copy of what it built before."""

    @lru_cache(maxsize=1024)
    def pattern(block: Any, device: torch.device) -> nn.Module | None:
        module = build(block)
        return _pattern(module, device) if all(map(_can_be_copied, module.modules())) else None

    @wraps(build)
    def built(block: Any) -> nn.Module:
        device = getattr(_here, "device", None)
        found = None if device is None else pattern(block, device)
        return build(block) if found is None else _copy(found, device)

    return built


def _can_be_copied(module: nn.Module) -> bool:
    """Whether a module holds nothing but modules, tensors and what never changes."""
    return all(name in _OWN or _is_plain(value) for name, value in module.__dict__.items())


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, _PLAIN)


def _pattern(module: nn.Module, device: torch.device) -> nn.Module:
    """The module as something to copy from: its parameters need no memory, its buffers have values."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def _copy(pattern: nn.Module, device: torch.device | None) -> nn.Module:
    made = object.__new__(type(pattern))
    state = dict(pattern.__dict__)
    for name in _OWN:
        state[name] = state[name].copy()
    state["_parameters"] = {n: p if p is None else _like(p, device) for n, p in pattern._parameters.items()}
    state["_buffers"] = {n: b if b is None else b.clone() for n, b in pattern._buffers.items()}
    state["_modules"] = {n: m if m is None else _copy(m, device) for n, m in pattern._modules.items()}
    object.__setattr__(made, "__dict__", state)  # torch's own way looks at every value
    return made


def _like(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
