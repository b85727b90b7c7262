"""The clients' devices: profiles, budgets, the cost model of a round, the simulated clock, availability."""

from .budget import Budget, Limits, require_feasible
from .clock import Clock, Round, available, round_seconds
from .fleet import NAMES, Device, Fleet, FleetConfig, make
from .profile import Profile, shipped

__all__ = [
    "NAMES",
    "Budget",
    "Clock",
    "Device",
    "Fleet",
    "FleetConfig",
    "Limits",
    "Profile",
    "Round",
    "available",
    "make",
    "require_feasible",
    "round_seconds",
    "shipped",
]
