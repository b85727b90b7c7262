"""The exceptions a user is meant to read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SAID = 4000  # letters of a line, at most
UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what would steer a terminal, or is no text at all


class UserError(Exception):
    """Bad input: the message says what is wrong, what is allowed and what to do. The CLI exits with code 2."""


class Diverged(UserError):
    """Training left the numbers."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{match[0]}'?" if match else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not among the known ones."""
    names = sorted(known)
    return UserError(f"unknown {kind} '{name}'.{nearest(name, names)} Known: {', '.join(names)}.")


def shown(text: str) -> str:
    """A line that says no more than a line can and steers no terminal, whatever it quotes."""
    text = UNSHOWN.sub("?", text)
    return text if len(text) <= SAID else f"{text[:SAID]}..."
