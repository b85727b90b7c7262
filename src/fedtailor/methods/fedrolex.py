"""FedRolex: Alam et al., NeurIPS 2022, Algorithm 1. HeteroFL with a sub-network that rolls over the wide one.

In round t a client of width k trains channels (t .. t + k - 1) mod K of every layer, so that after K rounds all entries
were trained equally often, also those that no client is wide enough for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..method import Card, Server
from ..options import AtLeastOne
from ..registry import register
from ..search.rolling import Places, window
from ..spaces.base import Arch, Space
from .heterofl import HeteroFL


@register("method", "fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    paper: ClassVar[str] = "Alam et al., NeurIPS 2022, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        *HeteroFL.deviations,
        "blocks and kernels do not roll: a shallower network has the first blocks, a smaller kernel is the centre",
    )
    card: ClassVar[Card] = replace(HeteroFL.card, policy="a window of the budget's width that rolls over the channels")

    needed: ClassVar[str] = (
        "its windows slide over channels, which must be narrowed from small to large and not be grouped into attention "
        "heads. Use mobilenetv2, mobilenetv3 or tiny"
    )

    step: AtLeastOne = 1  # channels by which the window moves each round

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return super().runs_on(space) and space.name != "vit"  # a window would begin inside an attention head

    def places(self, server: Server, arch: Arch) -> Places:
        return window(server.space, arch, self.step * server.round)
