"""Writes the pages of results from bench/results: `make results`. The same files give the same bytes.

python bench/results.py            # writes docs/results.md, docs/results-zoo.md and their pictures
python bench/results.py --check    # only says whether they are what they should be
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages_cifar
import pages_zoo

DOCS = Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """Every page and picture by its path in docs/."""
    return {"results-zoo.md": pages_zoo.page()} | pages_cifar.pages()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for name, text in pages().items():
        path = DOCS / name
        if args.check and (not path.exists() or path.read_bytes() != text.encode()):
            sys.exit(f"{path} is not what bench/results says: run make results")
        if not args.check:
            path.write_bytes(text.encode())
            print(path)


if __name__ == "__main__":
    main()
