"""What a device is: a profile, read strictly from TOML."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import UserError, nearest, unknown

SHIPPED = Path(__file__).with_name("profiles.toml")
Battery = Literal["none", "small", "large"]


@dataclass(frozen=True)
class Profile:
    """One device. Numbers are nominal; profiles.toml says how they were chosen."""

    name: str
    flops_per_second: float  # achieved in training, two per multiply-add
    memory: float  # bytes a training job may take
    up_mbit: float  # link to the server, 10^6 bits per second
    down_mbit: float
    availability: float  # probability of being reachable in a round
    battery: Battery

    def sharing(self, participants: int) -> Profile:
        """The device when its link is the server's, divided among the round's participants (as Plato does)."""
        return replace(self, up_mbit=self.up_mbit / participants, down_mbit=self.down_mbit / participants)


@dataclass(frozen=True)
class Catalogue:
    """A file of profiles, and who has them: in shares of the federation, or client by client."""

    profiles: Mapping[str, Profile]
    shares: Mapping[str, float] = field(default_factory=dict)
    clients: tuple[str, ...] = ()

    def get(self, name: str) -> Profile:
        if name not in self.profiles:
            raise unknown("device profile", name, self.profiles)
        return self.profiles[name]


@cache
def shipped() -> Catalogue:
    """The profiles that come with the package, with the shares of the fleet `mixed`."""
    return read_catalogue(SHIPPED)


def read_catalogue(path: Path) -> Catalogue:
    """A TOML file with tables [profiles.NAME], and [shares] or clients = [...]; see profiles.toml for the form.

    The shipped profiles can be named too; a profile of the same name in the file takes their place.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the device profiles of {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from error
    _no_unknown(str(path), content, ("profiles", "shares", "clients"))
    profiles = dict(shipped().profiles) if path != SHIPPED else {}
    for name, table in _table(f"{path}: profiles", content.get("profiles", {})).items():
        where = f"{path}: profile '{name}'"
        profiles[name] = _profile(where, name, _table(where, table))
    shares = _table(f"{path}: shares", content.get("shares", {}))
    for name, share in shares.items():
        _positive(f"{path}: shares", name, share)
    clients = content.get("clients", [])
    if not isinstance(clients, list) or not all(isinstance(name, str) for name in clients):
        raise UserError(f'{path}: clients must be a list of profile names, such as clients = ["laptop", "phone-low"].')
    for name in (*shares, *clients):
        if name not in profiles:
            raise UserError(f"{path}: {unknown('device profile', name, profiles)}")
    return Catalogue(profiles, shares, tuple(clients))


def _profile(where: str, name: str, table: Mapping[str, Any]) -> Profile:
    keys = [f.name for f in fields(Profile) if f.name != "name"]
    _no_unknown(where, table, keys)
    missing = [key for key in keys if key not in table]
    if missing:
        raise UserError(f"{where}: '{missing[0]}' is missing. A profile has {', '.join(keys)}.")
    if table["battery"] not in get_args(Battery):
        raise UserError(f"{where}: battery = {table['battery']!r} is not one of {', '.join(get_args(Battery))}.")
    numbers = {key: _positive(where, key, table[key]) for key in keys if key != "battery"}
    if numbers["availability"] > 1:
        raise UserError(f"{where}: availability = {numbers['availability']:g} is a probability, at most 1.")
    return Profile(name, **numbers, battery=table["battery"])


def _table(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a table, not {value!r}.")
    return value


def _no_unknown(where: str, table: Iterable[str], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'.{nearest(key, known)} Known: {', '.join(known)}.")


def _positive(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key} = {value!r} must be a number above 0.")
    return float(value)
