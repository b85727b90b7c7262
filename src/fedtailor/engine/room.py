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

    def free(self, lanes: int = 0) -> int:
        """Bytes that can still be had, from the driver within our share, or from what torch holds unused.

        What lanes hold, so many bytes, is unused between their steps, but nobody else can have it.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved, used = held(self.device)
        return max(0, min(free, self.size - reserved)) + max(0, reserved - used - lanes)


def held(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has of the driver, and how many of them are in use."""
    found = torch.cuda.memory_stats_as_nested_dict(device)  # empty where nothing was ever asked for
    reserved, used = (found[f"{kind}_bytes"]["all"]["current"] if found else 0 for kind in ("reserved", "allocated"))
    return reserved, used


def share() -> float:
    told = os.environ.get("FEDTAILOR_GPU_SHARE", "1")
    try:
        found = float(told)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UserError(f"FEDTAILOR_GPU_SHARE = '{told}' is no part of a card: set it to a number above 0, at most 1.")
    return found
