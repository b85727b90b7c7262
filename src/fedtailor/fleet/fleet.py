"""Who has which device: named distributions of profiles and budgets over the clients of a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import UserError, unknown
from ..options import Fraction, NonNegative, Positive
from .budget import Budget, Limits, budget_of
from .profile import Profile, read_catalogue, shipped

NAMES = {
    "equal": "everybody has the same device (option `profile`) and no limits",
    "uniform-memory": "the same device with 2 to 16 GB, uniform per client, which its network must fit (PerFedRLNAS)",
    "capacity-high": "50/30/20 % of the clients afford the largest network, a medium or a low one (FedCS, HIGH)",
    "capacity-low": "20/30/50 % of the clients afford the largest network, a medium or a low one (FedCS, LOW)",
    "mixed": "people's devices, from small phones to a workstation, drawn by the shares of profiles.toml",
    "file:PATH": "your own TOML of profiles, with their shares or client by client",
}
CAPACITY_SHARES = {"capacity-high": (0.5, 0.3, 0.2), "capacity-low": (0.2, 0.3, 0.5)}  # high, medium, low
# FedCS names its tiers by MobileNetV2's width: x1, x.75, x.5. Those networks do not cost .75 and .5 of the largest, but
# 59.3 and 28.0 of 88.0 million multiply-adds on CIFAR, 1.368 and 0.700 of 2.237 million parameters with 10 classes.
# Rounded up, so that the x.75 and x.5 networks fit their own tier. (100 classes: parameters .64 and .35.)
CAPACITY_COSTS = {"flops": (1.0, 0.68, 0.32), "parameters": (1.0, 0.62, 0.32)}


@dataclass(frozen=True)
class FleetConfig:
    """The table [fleet]: the clients' devices."""

    name: str = "equal"  # the distribution: equal, uniform-memory, capacity-high, capacity-low, mixed or file:PATH
    profile: str = "phone-high"  # the device of equal, uniform-memory and capacity-*
    up_mbit: NonNegative = 0.0  # every client's link to the server; 0 = its device's own
    down_mbit: NonNegative = 0.0  # every client's link from the server; 0 = its device's own
    shared_link: bool = False  # divide the links by the number of participants of the round, as Plato does
    availability: Fraction = 1.0  # probability that a client is reachable in a round; 0 = its device's own
    deadline: NonNegative = 0.0  # seconds after which a client's reply is dropped; 0 = the server waits for everybody
    hard: bool = True  # never give a client an arch beyond its budget; false = budgets only price archs (eq. 9)
    memory_gb: tuple[Positive, Positive] = (2.0, 16.0)  # uniform-memory: the range, in 10^9 bytes
    quantity: Literal["flops", "parameters"] = "flops"  # capacity-*: what the tiers limit
    fractions: tuple[Positive, ...] = ()  # capacity-*: high, medium, low as parts of the largest; [] = MobileNetV2's
    budget: Limits = field(default_factory=Limits)  # limits for everybody, beside the distribution's own

    def __post_init__(self) -> None:
        if self.name not in NAMES and not self.name.startswith("file:"):
            raise unknown("fleet", self.name, NAMES)
        shipped().get(self.profile)
        if self.memory_gb[0] > self.memory_gb[1]:
            raise UserError(f"fleet.memory_gb = {list(self.memory_gb)}: the lower end of the range comes first.")
        if len(self.fractions) not in (0, 3):
            raise UserError(f"fleet.fractions = {list(self.fractions)}: give three numbers, for high, medium and low.")


class Device(NamedTuple):
    """What one client has and what it can afford."""

    profile: Profile
    budget: Budget


Fleet = tuple[Device, ...]


def make(config: FleetConfig, clients: int, seed: int) -> Fleet:
    """The devices of clients 0, 1, ...: fixed for the run, the same for the same config and seed."""
    if clients < 1:
        raise UserError(f"a fleet has at least one client, not {clients}.")
    devices = _distribute(config, clients, seed)
    limits = config.budget.budget()
    return tuple(Device(_overridden(config, profile), budget & limits) for profile, budget in devices)


def newcomer(config: FleetConfig, clients: int, seed: int, profile: str = "") -> Device:
    """The device of a client that joins a fleet of so many: the one named, or what the distribution gives it."""
    limits = config.budget.budget()
    if profile:
        own = config.name.startswith("file:")  # its file names devices too
        found = (read_catalogue(Path(config.name.removeprefix("file:"))) if own else shipped()).get(profile)
        return Device(_overridden(config, found), _limited_by_memory(found).budget & limits)
    try:
        return make(config, clients + 1, seed)[-1]
    except UserError as error:
        raise UserError(f"the fleet has no device for one more client ({error}) Name one with --profile.") from error


def table_of(device: Device) -> dict[str, Any]:
    """A device as a plain table, to write down with a run."""
    return asdict(device.profile) | {"limits": {"absolute": device.budget.limits, "of_largest": _fractions(device)}}


def device_of(table: Mapping[str, Any]) -> Device:
    """The device of such a table."""
    limits = table["limits"]
    fractions = budget_of(limits["of_largest"]) if limits["of_largest"] else None
    profile = Profile(**{key: value for key, value in table.items() if key != "limits"})
    return Device(profile, budget_of(limits["absolute"], fractions))


def _fractions(device: Device) -> dict[str, float]:
    return device.budget.of_largest.limits if device.budget.of_largest else {}


def _distribute(config: FleetConfig, clients: int, seed: int) -> list[Device]:
    from ..seeds import rng_of  # seeds imports torch, which a reader of the config should not wait for

    base = shipped().get(config.profile)
    if config.name == "uniform-memory":
        low, high = config.memory_gb
        memory = [1e9 * float(rng_of(seed, "fleet", "memory", c).uniform(low, high)) for c in range(clients)]
        return [_limited_by_memory(replace(base, memory=m)) for m in memory]
    if config.name in CAPACITY_SHARES:
        fractions = config.fractions or CAPACITY_COSTS[config.quantity]
        tiers = [Budget(of_largest=budget_of({config.quantity: f})) for f in fractions]
        return [Device(base, tiers[t]) for t in deal(CAPACITY_SHARES[config.name], clients, seed)]
    if config.name == "mixed":
        # drawn client by client rather than dealt: a client keeps its device when others join the federation
        names, weights = list(shipped().shares), list(shipped().shares.values())
        p = [w / math.fsum(weights) for w in weights]
        picks = [int(rng_of(seed, "fleet", "mixed", c).choice(len(names), p=p)) for c in range(clients)]
        return [_limited_by_memory(shipped().profiles[names[i]]) for i in picks]
    if config.name.startswith("file:"):
        return [_limited_by_memory(p) for p in _from_file(Path(config.name.removeprefix("file:")), clients, seed)]
    return [Device(base, Budget())] * clients


def _from_file(path: Path, clients: int, seed: int) -> list[Profile]:
    file = read_catalogue(path)
    if bool(file.shares) == bool(file.clients):
        raise UserError(f"{path}: say who has which device, either by a table [shares] or by a list clients = [...].")
    if file.clients:
        if len(file.clients) != clients:
            raise UserError(
                f"{path}: clients lists {len(file.clients)} devices, but the federation has {clients} clients."
            )
        return [file.get(name) for name in file.clients]
    names = list(file.shares)
    return [file.get(names[i]) for i in deal(list(file.shares.values()), clients, seed)]


def deal(shares: Sequence[float], clients: int, seed: int) -> list[int]:
    """Which share each client falls into: exact counts (largest remainders get the odd ones), shuffled by the seed."""
    from ..seeds import rng_of

    total = math.fsum(shares)
    quotas = [round(clients * share / total, 9) for share in shares]  # 10 * .3 must be 3, not 3.0000000000000004
    counts = [int(q) for q in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: clients - sum(counts)]:
        counts[i] += 1
    dealt = [i for i, count in enumerate(counts) for _ in range(count)]
    return [dealt[i] for i in rng_of(seed, "fleet", "deal").permutation(clients)]


def _limited_by_memory(profile: Profile) -> Device:
    return Device(profile, Budget(memory=profile.memory))


def _overridden(config: FleetConfig, profile: Profile) -> Profile:
    return replace(
        profile,
        up_mbit=config.up_mbit or profile.up_mbit,
        down_mbit=config.down_mbit or profile.down_mbit,
        availability=config.availability or profile.availability,
    )
