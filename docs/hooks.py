"""For mkdocs: every page of docs/methods/ is in the navigation, and what methods declare is written into the pages.

A line `<!-- table of methods -->` becomes the output of `fedtailor list methods --table`, and `<!-- explain NAME -->`
that of `fedtailor explain NAME`. Both come from the code that is documented, so they cannot be out of date.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    folder = Path(config["docs_dir"]) / "methods"
    first = ["index.md", "table.md"]
    pages = first + sorted(path.name for path in folder.glob("*.md") if path.name not in first)
    for section in config["nav"]:
        if "Methods" in section:
            section["Methods"] = [f"methods/{name}" for name in pages]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    from fedtailor.report.explain import explain
    from fedtailor.report.explain import markdown as table

    if "<!-- table of methods -->" in markdown:
        markdown = markdown.replace("<!-- table of methods -->", table())
    return re.sub(r"<!-- explain (\S+) -->", lambda found: f"```text\n{explain(found[1])}\n```", markdown)
