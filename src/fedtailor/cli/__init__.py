"""The command line. Commands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point: runs the command; a user's error is one clear message and exit code 2."""
    from ..errors import UserError

    if sys.argv[1:2] == ["predict"]:  # may run where nothing of fedtailor's own needs is installed
        from ..export import predict

        try:
            sys.exit(predict.main(sys.argv[2:]))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:  # whoever reads the answers, `head` for example, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
    try:
        from .main import app, console
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} is not installed. Only 'fedtailor predict' does without; the rest needs "
            "'pip install fedtailor', without --no-deps."
        )

    try:
        app()
    except UserError as error:
        console.stderr = True
        console.print(f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
