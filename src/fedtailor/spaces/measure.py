"""What a piece of network costs, counted once on the meta device and remembered.

Counting runs the real module on tensors without storage, so the counts are exact by construction and no arithmetic is
spent. A space is costed block by block: equal blocks are counted once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Cost of a network, or of a piece of one, for one image."""

    parameters: int = 0
    buffers: int = 0  # normalisation statistics
    flops: int = 0  # forward pass, two per multiply-add, as torch counts them
    activations: int = 0  # bytes kept for the backward pass
    peak: int = 0  # bytes of the largest tensors alive at once in inference, input and output of one layer

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.buffers + other.buffers,
            self.flops + other.flops,
            self.activations + other.activations,
            max(self.peak, other.peak),
        )

    @property
    def train_flops(self) -> int:
        """One training step for one image: the backward pass costs twice the forward pass."""
        return 3 * self.flops

    @property
    def bytes(self) -> int:
        """Bytes to send the network once."""
        return FLOAT_BYTES * (self.parameters + self.buffers)

    def training_memory(self, batch: int) -> int:
        """Bytes to train with SGD and momentum: weights, gradients, momenta, statistics and kept activations."""
        return FLOAT_BYTES * (3 * self.parameters + self.buffers) + batch * self.activations

    def inference_memory(self, batch: int = 1) -> int:
        """Bytes to run the network."""
        return self.bytes + batch * self.peak


def total(costs: Iterable[Cost]) -> Cost:
    """The sum. Adding numbers instead of `Cost`s makes it several times as fast, and searches add a lot of them."""
    parameters = buffers = flops = activations = peak = 0
    for c in costs:
        parameters += c.parameters
        buffers += c.buffers
        flops += c.flops
        activations += c.activations
        if c.peak > peak:
            peak = c.peak
    return Cost(parameters, buffers, flops, activations, peak)


@dataclass(frozen=True)
class Piece:
    """What is known of one block without building it again: its cost, its tensors' shapes, its output shapes."""

    cost: Cost
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[int, ...], ...]


def count(build: Callable[[], nn.Module], inputs: Sequence[tuple[int, ...]]) -> Piece:
    """Builds a module on the meta device and counts it on inputs of the given shapes (without the batch axis)."""
    batch = 2  # batch normalisation wants more than one value per channel
    with torch.device("meta"):
        module = build().train()
        tensors = [torch.empty((batch, *shape), requires_grad=True) for shape in inputs]
        saved: dict[int, Tensor] = {}
        sizes: list[int] = []
        owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()._cdata
            if storage not in owned:
                saved[storage] = t
            return t

        def watch(_: nn.Module, args: tuple[object, ...], out: object) -> None:
            alive = [t for t in (*args, out) if isinstance(t, Tensor)]
            sizes.append(sum(t.numel() for t in alive) * FLOAT_BYTES // batch)

        hooks = [m.register_forward_hook(watch) for m in module.modules() if not list(m.children())]
        hold = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with (
            torch.enable_grad(),
            FlopCounterMode(display=False) as counter,
            hold,
        ):  # also under no_grad
            out = module(*tensors)
        for hook in hooks:
            hook.remove()
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    ends = {t.untyped_storage()._cdata for t in outputs}  # the next block counts it as its input
    activations = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in ends) // batch
    cost = Cost(
        parameters=sum(p.numel() for p in module.parameters()),
        buffers=sum(b.numel() for n, b in module.named_buffers() if not n.endswith(("num_batches_tracked", "counter"))),
        flops=counter.get_total_flops() // batch,
        activations=activations,
        peak=max(sizes, default=0),
    )
    shapes = tuple((name, tuple(t.shape)) for name, t in tensors_of(module).items())
    return Piece(cost, shapes, tuple(tuple(t.shape[1:]) for t in outputs))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that make a network's weights: parameters and statistics, by name, without step counters."""
    known = module.__dict__.get("known_tensors")
    return dict(known) if known else _tensors_of(module)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a network by name."""
    known = module.__dict__.get("known_parameters")
    return dict(known) if known else dict(module.named_parameters())


def let_learn(module: nn.Module) -> None:
    """Every parameter of a network gets gradients again."""
    for parameter in parameters_of(module).values():
        parameter.requires_grad_(True)


def drop_gradients(module: nn.Module) -> None:
    for parameter in parameters_of(module).values():
        parameter.grad = None


def remember_tensors(module: nn.Module) -> None:
    """Looks a finished network's tensors up once; walking through its modules every time costs more than many a step.

    From now on the tensors change in place only.
    """
    module.known_tensors = _tensors_of(module)  # type: ignore[assignment]
    module.known_parameters = dict(module.named_parameters())  # type: ignore[assignment]


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of some tensors, without their history, in as few operations as there are kinds of them."""
    found = {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in tensors.items()}
    if found:
        with torch.no_grad():
            torch._foreach_copy_(list(found.values()), list(tensors.values()))
    return found


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in module.state_dict(keep_vars=True).items() if not n.endswith("num_batches_tracked")}
