"""What a device wants of a network that has just been built: layouts and layers that its fast kernels ask for."""

from __future__ import annotations

import torch
from torch import nn

WIDE = 64  # channels


def fit_out(net: nn.Module, input: tuple[int, int, int], precision: str) -> None:
    """Gets a network on a GPU ready for training in this precision. It computes the same."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.affine:
            give_scale(module)
    if precision != "fp32" and is_wide(net):
        lay_last(net, input)


def lay_last(net: nn.Module, input: tuple[int, int, int]) -> None:
    """Lets the images inside a network lie with their channels last, unless its layers refuse to read them like that.

    `view` does, where a network flattens its images by it; so it is tried once.
    """
    if not any(isinstance(m, nn.Conv2d) for m in net.modules()):
        return
    training, device = net.training, next(net.parameters()).device
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            net.eval()(torch.zeros((2, *input), device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever it is, it is told when the network meets its own weights and images
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    finally:
        net.train(training)


def is_wide(net: nn.Module) -> bool:
    """Whether all of a network's convolutions are of the kind that tensor cores are fed with, many channels by many.

    Their kernels read channels last: other networks' tensors would be turned round before and after each of them.
    """
    found = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    return bool(found) and all(m.groups == 1 and m.out_channels >= WIDE for m in found)


def give_scale(norm: nn.modules.batchnorm._BatchNorm) -> None:
    """Scales by one and shifts by zero: the convolution library's one-kernel normalisation asks for both."""
    assert norm.running_var is not None
    for name, fill in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
        del norm._parameters[name]
        norm.register_buffer(name, fill(norm.running_var), persistent=False)
