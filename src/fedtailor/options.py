"""Reading a table of options into a frozen dataclass, strictly.

Configs, methods, spaces, nets, partitions and fleets are all frozen dataclasses; this is the one place that turns a
TOML table into one. An unknown key or a wrong value is one error that names the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from .errors import UserError, nearest

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]

T = TypeVar("T")


@functools.lru_cache(maxsize=512)
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


@functools.lru_cache(maxsize=512)
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in _types(cls).items()}


def read(cls: type[T], table: Mapping[str, Any], where: str, given: Mapping[str, Any] | None = None) -> T:
    """An instance of the dataclass from a table; `given` are fields that the program sets, not the user."""
    return cls(**(given or {}), **check(cls, table, where, hidden=given or ()))


def check(cls: type, table: Mapping[str, Any], where: str, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The table's values, converted to the fields' types."""
    adapters = {name: adapter for name, adapter in _adapters(cls).items() if name not in hidden}
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{where}.{key}" if where else key
        if key not in adapters:
            known = ", ".join(adapters) or "none"
            raise UserError(f"unknown key '{path}'.{nearest(key, adapters)} Known keys here: {known}.")
        kind = _types(cls)[key]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, Mapping):
                example = f"{path}.{next(iter(_types(kind)))}"
                raise UserError(f"{path} = {value!r}: this is a table of keys, for example {example} = ...")
            found[key] = read(kind, value, path)
        else:
            found[key] = _convert(adapters[key], value, path)
    return found


def _convert(adapter: TypeAdapter[Any], value: Any, path: str) -> Any:
    try:
        return adapter.validate_json(json.dumps(value), strict=True)  # JSON rules: a list may become a tuple
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path} = {value!r}: {first['msg'][0].lower()}{first['msg'][1:]}.") from error
    except TypeError as error:
        raise UserError(f"{path} = {value!r}: not a value that TOML can hold ({error}).") from error


def table_of(instance: Any, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The options of a dataclass as a plain table."""
    names = [f.name for f in dataclasses.fields(instance) if f.name not in hidden]
    return {n: _plain(v) for n in names if (v := getattr(instance, n)) is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return table_of(value)
    return list(value) if isinstance(value, tuple) else value
