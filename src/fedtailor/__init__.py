"""fedtailor: federated learning in which every client ends with its own network, architecture and weights.

import fedtailor as ft

run = ft.run("demo", method="ditto")
run.table()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "__version__", "compare", "load", "resume", "run"]

if TYPE_CHECKING:
    from .api import Run, compare, load, resume, run
    from .errors import UserError


def __getattr__(name: str) -> Any:
    """Loads the parts on first use, so that `import fedtailor` costs next to nothing."""
    if name in ("Run", "compare", "load", "resume", "run"):
        from . import api

        return getattr(api, name)
    if name == "UserError":
        from .errors import UserError

        return UserError
    raise AttributeError(f"module 'fedtailor' has no attribute '{name}'")
