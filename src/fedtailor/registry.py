"""Names for methods, spaces and nets: one file, one or more names, found without importing torch.

A name registers itself with a decorator in its own file. `lookup` also takes a user's own class, as
`path/to/file.py`, `path/to/file.py:Name` or `package.module:Name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError, unknown

KINDS = {"method": "fedtailor.methods", "space": "fedtailor.spaces", "net": "fedtailor.nets"}
_known: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
T = TypeVar("T")


def register(kind: str, name: str) -> Callable[[T], T]:
    """Decorator that gives a class or function its public name."""

    def add(thing: T) -> T:
        _known[kind][name] = thing
        thing.name = name  # type: ignore[attr-defined]
        return thing

    return add


def names(kind: str) -> list[str]:
    """All names shipped with the package (imports every file of that room)."""
    package = importlib.import_module(KINDS[kind])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{KINDS[kind]}.{module.name}")
    return sorted(n for n, thing in _known[kind].items() if thing.__module__.startswith("fedtailor."))


def lookup(kind: str, name: str) -> Any:
    """The thing called `name`, or a user's own from a file or an import path."""
    if ".py" in name or ":" in name:
        return _user_defined(kind, name)
    shipped = names(kind)
    if name not in _known[kind]:
        raise unknown(kind, name, shipped)
    return _known[kind][name]


def _user_defined(kind: str, name: str) -> Any:
    source, _, attribute = name.partition(":")
    before = set(_known[kind])
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise UserError(f"{kind}.name = '{name}': there is no file {path}.")
        module_name = f"fedtailor_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            raise UserError(f"{kind}.name = '{name}': cannot import '{source}' ({error}).") from error
    if attribute:
        thing = getattr(module, attribute, None)
        if thing is None:
            raise UserError(f"{kind}.name = '{name}': '{source}' has no '{attribute}'.")
        return thing
    found = [n for n, thing in _known[kind].items() if thing.__module__ == module.__name__] or sorted(
        set(_known[kind]) - before
    )
    if len(found) != 1:
        raise UserError(
            f"{kind}.name = '{name}': the file registers {len(found)} of kind {kind} ({', '.join(found) or 'none'}); "
            f"name one as '{source}:ClassName'."
        )
    return _known[kind][found[0]]
