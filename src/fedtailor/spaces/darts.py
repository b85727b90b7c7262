"""The DARTS space (Liu, Simonyan and Yang, ICLR 2019) and its variants s1 to s5 (DARTS-PT: Wang et al., ICLR 2021).

The pairs of s1 are our own.

An arch names one operation for each of the 14 edges of the normal cell and of the reduction cell; all cells of a type
share it, each with weights of its own. Three networks live in this space, all with the supernet's tensor names:

* the single path `build(arch)` of FedRLNAS and PerFedRLNAS: one operation on every edge, `none` among them;
* the mixture `supernet()(x, gates)` of FedNAS: every operation, times its gate (`relaxed` turns α into gates);
* anything between, `build_keep(keep)`: the operations of each edge that are still alive (SPIDER's local networks).

`genotype` derives the two-edges-per-node cell, and `derived` is its network, to be trained from scratch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown
from ..kernels.layout import laid_by_channel
from ..kernels.norm import small
from ..kernels.norm_layer import BatchNorm
from ..registry import register
from ..seeds import Key, seed_of, torch_seed
from .base import Arch, Dimension, Index, Space, Weights, counted
from .darts_ops import (
    EDGES,
    EDGES_INTO,
    NODES,
    VARIANTS,
    Cell,
    CellPlan,
    Noise,
    Operation,
    Operations,
    Preprocess,
    plan,
)
from .layers import ConvBlock, HeadBlock, Norm
from .measure import Cost, Piece

Variant = Literal["full", "s1", "s2", "s3", "s4", "s5"]
Kept = tuple[tuple[int, ...], ...]
Keep = tuple[Kept, Kept]
"""A sub-network: for the normal and the reduction cell, the places of the operations kept on each of the 14 edges."""
Gates = tuple[Tensor, Tensor]
"""A number for each operation of the normal and of the reduction cell, [14, operations] each; α has the same form."""

TYPES = ("normal", "reduce")
DIMENSIONS: dict[str, tuple[Dimension, ...]] = {
    variant: tuple(
        Dimension(f"{kind}.edge{e}", names)
        for kind, edges in zip(TYPES, operations, strict=True)
        for e, names in enumerate(edges)
    )
    for variant, operations in VARIANTS.items()
}


class Network(nn.Module):
    """Stem, cells, mean over positions and the linear layer `head`."""

    def __init__(self, space: Darts, keep: Keep, affine: bool, drop_path: float = 0.0) -> None:
        super().__init__()
        self.choices = space.choices
        self.stem = space.stem.build()
        self.cells = nn.ModuleList(
            Cell(cell, space.operations[cell.kind], keep[cell.kind], space.norm, affine, drop_path)
            for cell in space.plan
        )
        self.head = nn.Linear(NODES * space.plan[-1].channels, space.classes)
        for name, module in self.named_modules():
            if isinstance(module, Noise):
                module.salt = seed_of("noise", name) >> 24

    def forward(self, x: Tensor, gates: Gates | None = None) -> Tensor:
        """The logits. Each operation's output is multiplied by its gate; without gates by 1, which is SPIDER's sum."""
        if gates is not None:
            for kind, rows in zip(TYPES, gates, strict=True):
                if rows.shape != (len(EDGES), self.choices):
                    raise UserError(
                        f"gates of the {kind} cell have shape {tuple(rows.shape)}, not ({len(EDGES)}, {self.choices})."
                    )
        before = last = self._laid(self.stem(x))
        for cell in self.cells:
            before, last = last, cell(before, last, None if gates is None else gates[cell.kind])  # type: ignore[index]
        return self.head(last.mean((2, 3)))

    def _laid(self, x: Tensor) -> Tensor:
        """What the cells start from as their kernels want it in training: planes channel by channel."""
        return laid_by_channel(x) if self.training and isinstance(self.stem.norm, BatchNorm) and small(x) else x


@register("space", "darts")
@dataclass(frozen=True)
class Darts(Space):
    """`channels` is C of the papers (they search with 16), `cells` the depth L, reductions at L/3 and 2L/3."""

    channels: int = 16
    cells: int = 8
    variant: Variant = "full"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown("variant of space 'darts'", str(self.variant), VARIANTS)
        if self.norm not in get_args(Norm):
            raise unknown("norm of space 'darts'", str(self.norm), get_args(Norm))
        if self.channels < 2 or self.channels % 2:
            raise UserError(f"space 'darts': channels = {self.channels} must be even and positive.")
        if self.cells < 3:
            raise UserError(f"space 'darts': cells = {self.cells}, but both cell types only exist from 3 cells on.")
        if min(self.input[1:]) < 4:
            raise UserError(f"space 'darts': images of {self.input[1]}x{self.input[2]} cannot be halved twice.")

    # archs ------------------------------------------------------------------------------------------------------

    @property
    def operations(self) -> Operations:
        """Names of the operations, by cell type and edge."""
        return VARIANTS[self.variant]

    @property
    def choices(self) -> int:
        """How many operations an edge chooses from; the same on every edge."""
        return len(self.operations[0][0])

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return DIMENSIONS[self.variant]

    @property
    def largest(self) -> Arch:
        """The most expensive operation everywhere. The papers' order of operations is not by size."""
        costs = [[(c.flops, c.parameters, c.activations) for c in options] for options in self._costs[1]]
        return tuple(options.index(max(options)) for options in costs)

    def word(self, arch: Arch | Keep) -> str:
        """Of a sub-network: the places kept on each edge, as in 1-0-0+1-x; x where an edge keeps nothing."""
        if not _is_keep(arch):
            return super().word(arch)  # type: ignore[arg-type]
        return "-".join("+".join(map(str, places)) or "x" for edges in arch for places in edges)

    def describe(self, arch: Arch) -> str:
        counts = {
            kind: Counter(op for _, _, op in edges).most_common()
            for kind, edges in self.edges_of(self.keep_of(arch)).items()
        }
        return "; ".join(f"{kind}: {', '.join(f'{n} {op}' for op, n in ops) or 'none'}" for kind, ops in counts.items())

    def draw(self, arch: Arch) -> str:
        return self.draw_keep(self.keep_of(arch))

    def draw_keep(self, keep: Keep) -> str:
        """Both cells of a sub-network as SVG."""
        from .draw import cells_svg

        return cells_svg(self.edges_of(keep))

    # sub-networks -----------------------------------------------------------------------------------------------

    def keep_of(self, arch: Arch | Keep) -> Keep:
        """The single path as a sub-network: one operation per edge. A sub-network is taken as it is.

        So engines, which pass archs on unread, build, cost and draw sub-networks too.
        """
        if _is_keep(arch):
            return self.check_keep(arch)
        kept = tuple((i,) for i in self.check(arch))  # type: ignore[arg-type]
        return kept[: len(EDGES)], kept[len(EDGES) :]

    @cached_property
    def full_keep(self) -> Keep:
        """Every operation: the supernet."""
        edges = (tuple(range(self.choices)),) * len(EDGES)
        return edges, edges

    def check_keep(self, keep: Sequence[Sequence[Sequence[int]]]) -> Keep:
        """The sub-network as sorted tuples, or an error that names the edge."""
        if len(keep) != 2 or any(len(edges) != len(EDGES) for edges in keep):
            raise UserError(f"a sub-network of 'darts' is a pair (normal, reduce), each with {len(EDGES)} edges.")
        for kind, edges in zip(TYPES, keep, strict=True):
            for e, places in enumerate(edges):
                wrong = [i for i in places if not 0 <= i < self.choices]
                if wrong or len(set(places)) != len(places):
                    raise UserError(
                        f"{kind}.edge{e} keeps {tuple(places)}: name distinct operations, 0..{self.choices - 1}."
                    )
        normal, reduce = (tuple(tuple(sorted(int(i) for i in places)) for places in edges) for edges in keep)
        return normal, reduce

    def edges_of(self, keep: Keep) -> dict[str, list[tuple[int, int, str]]]:
        """By cell type, (state, node, operation) for every kept operation but `none`."""
        return {
            kind: [(*EDGES[e], names[e][i]) for e, places in enumerate(edges) for i in places if names[e][i] != "none"]
            for kind, edges, names in zip(TYPES, self.check_keep(keep), self.operations, strict=True)
        }

    def build(self, arch: Arch) -> nn.Module:
        return Network(self, self.keep_of(arch), affine=False)

    def supernet(self) -> nn.Module:
        return Network(self, self.full_keep, affine=False)

    def build_keep(self, keep: Keep, affine: bool = False) -> nn.Module:
        """The sub-network: on each edge the sum of the kept operations. It takes gates as the supernet does."""
        return Network(self, self.check_keep(keep), affine)

    def derived(self, keep: Keep, drop_path: float = 0.0) -> nn.Module:
        """The discrete network to be trained from scratch: affine norms, bare pools, drop-path if asked for.

        Its tensors are not the supernet's (the search has no affine parameters), so nothing can be inherited by
        mistake. For the depth and width of an evaluation: `replace(space, channels=36, cells=20).derived(keep)`.
        """
        return Network(self, self.check_keep(keep), affine=True, drop_path=drop_path)

    def names_of(self, keep: Keep) -> tuple[str, ...]:
        """The tensors of a sub-network, by their names in the supernet."""
        return tuple(f"{prefix}.{name}" for prefix, piece in self.pieces_keep(keep).items() for name, _ in piece.shapes)

    def index(self, arch: Arch | Keep) -> Mapping[str, Index]:
        """Takes sub-networks too, and with it `paste`: they own whole tensors."""
        if not _is_keep(arch):
            return super().index(arch)  # type: ignore[arg-type]
        return dict.fromkeys(self.names_of(arch), ())

    def cut_keep(self, weights: Weights, keep: Keep) -> Weights:
        """The sub-network's own copy of its tensors (differentiable)."""
        return self.cut(weights, keep)  # type: ignore[arg-type]

    # mixtures and derivation ------------------------------------------------------------------------------------

    def new_alpha(self, *key: Key) -> Gates:
        """Fresh architecture parameters α, nearly uniform: 0.001 times standard normal, as DARTS starts."""
        with torch_seed("alpha", *key):
            normal, reduce = 1e-3 * torch.randn(2, len(EDGES), self.choices)
        return normal, reduce

    @staticmethod
    def relaxed(alpha: Gates) -> Gates:
        """DARTS' continuous relaxation (its eq. 2): on each edge the softmax of α."""
        normal, reduce = alpha
        return normal.softmax(-1), reduce.softmax(-1)

    def gates_of(self, keep: Keep) -> Gates:
        """1 for each kept operation, 0 for the others."""
        normal, reduce = torch.zeros(2, len(EDGES), self.choices)
        for rows, edges in zip((normal, reduce), self.check_keep(keep), strict=True):
            for e, places in enumerate(edges):
                rows[e, list(places)] = 1
        return normal, reduce

    def genotype(self, alpha_normal: Tensor, alpha_reduce: Tensor) -> Keep:
        """DARTS section 2.4: per node the two edges whose best operation weighs most, each with that operation.

        `none` is never chosen and weighs nothing, though it does take part in the softmax. Ties go to the lower number.
        """
        normal, reduce = (
            self._top_two(kind, torch.as_tensor(alpha).detach().double().softmax(-1).tolist())
            for kind, alpha in enumerate((alpha_normal, alpha_reduce))
        )
        return normal, reduce

    def genotype_of(self, arch: Arch) -> Keep:
        """The genotype of a single path, from one-hot weights: per node its first two edges that carry anything.

        All its edges weigh the same, so prefer `genotype` where there is an α to rank them.
        """
        normal, reduce = (self._top_two(kind, g.tolist()) for kind, g in enumerate(self.gates_of(self.keep_of(arch))))
        return normal, reduce

    def _top_two(self, kind: int, weights: list[list[float]]) -> Kept:
        kept: list[tuple[int, ...]] = [()] * len(EDGES)
        for edges in EDGES_INTO.values():
            best: list[tuple[float, int, int]] = []
            for e in edges:
                real = [i for i, name in enumerate(self.operations[kind][e]) if name != "none"]
                place = max(real, key=lambda i, row=weights[e]: row[i])
                best.append((-weights[e][place], e, place))
            for weight, e, place in sorted(best)[:2]:
                if weight:
                    kept[e] = (place,)
        return tuple(kept)

    # costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> tuple[CellPlan, ...]:
        return plan(self.channels, self.cells, (self.input[1], self.input[2]))

    @property
    def stem(self) -> ConvBlock:
        return ConvBlock(self.input[0], 3 * self.channels, 3, act="", norm=self.norm)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        return self.pieces_keep(self.keep_of(arch))

    def pieces_keep(self, keep: Keep, affine: bool = False) -> dict[str, Piece]:
        """The counted pieces of a sub-network: stem, preprocessing, every operation of every cell, head."""
        keep = self.check_keep(keep)
        found = {"stem": counted(self.stem, self.input)}
        for k, cell in enumerate(self.plan):
            found |= {f"cells.{k}.pre{i}": self._pre(cell, i, affine) for i in range(2)}
            for e, places in enumerate(keep[cell.kind]):
                for i in places:
                    name = self.operations[cell.kind][e][i]
                    if name != "none":
                        found[f"cells.{k}.edges.{e}.{name}"] = self._op(cell, e, name, affine)
        last = self.plan[-1]
        features = NODES * last.channels
        found["head"] = counted(HeadBlock(features, self.classes), (features, *last.size(2)))
        return found

    def cost(self, arch: Arch) -> Cost:
        """The same as the sum of the pieces, from sums over all cells of a type that are made once.

        Parameters, buffers and operations are exact. Kept activations are too, but for states read by several pools,
        which are counted once per pool.
        """
        if _is_keep(arch):  # type: ignore[arg-type]
            return self.cost_keep(arch)
        rest, edges = self._costs
        return sum((options[i] for options, i in zip(edges, self.check(arch), strict=True)), rest)

    def cost_keep(self, keep: Keep, affine: bool = False) -> Cost:
        """What a sub-network costs; with `affine` as the derived network."""
        return sum((p.cost for p in self.pieces_keep(keep, affine).values()), Cost())

    @cached_property
    def _costs(self) -> tuple[Cost, list[list[Cost]]]:
        """What every arch pays, and what each option of each dimension adds."""
        nothing: Kept = ((),) * len(EDGES)
        options = [
            [self._over_cells(kind, e, op) for op in self.operations[kind][e]]
            for kind in (0, 1)
            for e in range(len(EDGES))
        ]
        return self.cost_keep((nothing, nothing)), options

    def _over_cells(self, kind: int, edge: int, name: str) -> Cost:
        if name == "none":
            return Cost()
        return sum((self._op(cell, edge, name).cost for cell in self.plan if cell.kind == kind), Cost())

    def _pre(self, cell: CellPlan, i: int, affine: bool) -> Piece:
        block = Preprocess(cell.cin[i], cell.channels, cell.halve and i == 0, self.norm, affine)
        return counted(block, (cell.cin[i], *cell.sizes[i]))

    def _op(self, cell: CellPlan, edge: int, name: str, affine: bool = False) -> Piece:
        block = Operation(name, cell.channels, cell.stride(edge), self.norm, affine)
        return counted(block, (cell.channels, *cell.size(EDGES[edge][0])))


def _is_keep(arch: Arch | Keep) -> TypeGuard[Keep]:
    return len(arch) == 2 and isinstance(arch[0], tuple)
