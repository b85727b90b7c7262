"""For mkdocs: every page of docs/methods/ is in the navigation, without being listed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    folder = Path(config["docs_dir"]) / "methods"
    pages = sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")
    for section in config["nav"]:
        if "Methods" in section:
            section["Methods"] = ["methods/index.md", *(f"methods/{name}" for name in pages)]
    return config
