"""How much of a GPU's memory there is for this process."""

from __future__ import annotations

import os

import torch

from ..errors import UserError


class Room:
    """This process' share of a card's memory: all of it, unless FEDTAILOR_GPU_SHARE says that others have theirs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = int(share() * torch.cuda.get_device_properties(device).total_memory)
        if share() < 1:  # who takes more than their share is the one to be refused
            torch.cuda.set_per_process_memory_fraction(share(), device.index)  # it takes no device without a number

    def free(self) -> int:
        """Bytes that can still be had, from the driver within our share, or from what torch holds unused."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not held:
            return min(free, self.size)
        reserved, used = (held[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
        return max(0, min(free, self.size - reserved)) + reserved - used


def share() -> float:
    told = os.environ.get("FEDTAILOR_GPU_SHARE", "1")
    try:
        found = float(told)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UserError(f"FEDTAILOR_GPU_SHARE = '{told}' is no part of a card: set it to a number above 0, at most 1.")
    return found
