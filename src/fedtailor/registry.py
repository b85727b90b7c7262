"""Names for methods, spaces and nets: one file, one or more names, found without importing torch.

A name registers itself with a decorator in its own file. `lookup` also takes a user's own class, as
`path/to/file.py`, `path/to/file.py:Name` or `package.module:Name`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
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
    return sorted(_shipped(kind))


def _shipped(kind: str) -> dict[str, Any]:
    package = importlib.import_module(KINDS[kind])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{KINDS[kind]}.{module.name}")
    return {n: thing for n, thing in _known[kind].items() if thing.__module__.startswith("fedtailor.")}


def lookup(kind: str, name: str) -> Any:
    """The thing called `name`, or a user's own from a file or an import path."""
    if _is_own(name):
        return _user_defined(kind, name)
    shipped = names(kind)
    if name not in _known[kind]:
        raise unknown(kind, name, shipped)
    return _known[kind][name]


def code_in(value: object) -> Iterator[str]:
    """Every name of code that did not come with the package, in a table of a config and in what lies within it.

    Not only the thing itself is named there: its rewards and private networks are, too.
    """
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from code_in(item)
    elif isinstance(value, str) and _is_own(value):
        yield value


def _is_own(name: str) -> bool:
    """Whether a name is that of a user's file or of an import path: looking it up would run what is there."""
    return ".py" in name or ":" in name


def _user_defined(kind: str, name: str) -> Any:
    source, _, attribute = name.partition(":")
    shipped = {k: _shipped(k) for k in KINDS}
    try:
        if source.endswith(".py"):
            module = _loaded(Path(source), f"{kind}.name = '{name}'")
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
        registered = _known[kind]
        found = [n for n, thing in registered.items() if thing.__module__ == module.__name__]
        if not found:  # its own, from a file that it imports; that one is run once, and this one at every question
            own = {id(thing) for thing in vars(module).values()} - {id(thing) for thing in shipped[kind].values()}
            found = sorted(n for n, thing in registered.items() if id(thing) in own)
        if len(found) != 1:
            raise UserError(
                f"{kind}.name = '{name}': the file registers {len(found)} of kind {kind} "
                f"({', '.join(found) or 'none'}); name one as '{source}:ClassName'."
            )
        return registered[found[0]]
    finally:
        for k, things in shipped.items():  # what is called 'ditto' in the user's file is not fedtailor's ditto
            _known[k].update(things)


def _loaded(path: Path, where: str) -> ModuleType:
    """A user's file, run anew: it may have changed since it was last asked for."""
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}.")
    mark = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:8]
    module_name = f"fedtailor_user_{path.stem}_{mark}"  # another file may have the same name in another folder
    for known in _known.values():
        for old in [n for n, thing in known.items() if thing.__module__ == module_name]:
            del known[old]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        place = f"{path}{_line(error, str(path.absolute()))}"
        raise UserError(f"{where}: {type(error).__name__} in {place}: {reason}.") from error
    return module


def _line(error: Exception, file: str) -> str:
    """Where in a file an error arose."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""
