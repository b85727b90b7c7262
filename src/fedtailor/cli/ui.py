"""`fedtailor ui`: runs in the browser, while they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def ui_command(
    runs: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="A folder that holds runs, at any depth up to four, or one run.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8642,
    host: Annotated[str, typer.Option(help="Address. Any other than 127.0.0.1 needs --token.")] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(metavar="TEXT", help="What a reader must present; `auto` makes one.", show_default=False)
    ] = "",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
) -> None:
    """Look at runs in your browser: as they happen, side by side, client by client.

    The page reads run folders and writes nothing. Finished runs, running ones and broken ones all appear; a run that is
    deleted, resumed or damaged while you watch is said so. Every picture can be saved as SVG, its data as CSV.

    Examples:

    - `fedtailor ui` shows what is in runs/
    - `fedtailor ui runs/digits-ditto-1 --open` shows one run
    - `fedtailor ui --host 0.0.0.0 --token auto` shows it to your network, to those who have the token

    Needs: pip install 'fedtailor[ui]'
    """
    import secrets
    import socket

    from rich.console import Console

    from ..errors import UserError

    try:
        import uvicorn

        from ..ui.server import application
    except ImportError:
        raise UserError("the page needs starlette and uvicorn: pip install 'fedtailor[ui]'") from None
    if host not in LOOPBACK and not token:
        raise UserError(
            f"--host {host} lets other machines in. Runs hold names of clients, pictures of theirs and paths of this "
            "machine, so readers must prove that they may: add --token auto, or --token with a secret of your own. The "
            "connection is not encrypted: across networks that you do not trust, use an SSH tunnel to 127.0.0.1."
        )
    if token and token != "auto" and len(token) < 16:
        raise UserError("--token: at least 16 characters, so that it cannot be guessed; or auto.")
    if token == "auto":
        token = secrets.token_urlsafe(24)
    app = application(runs, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # whoever reads the address may ask at once
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}). Choose another --port; 0 is any."
        ) from None
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
    console = Console()
    console.print(f"{runs}: {address}   (Ctrl-C ends)", markup=False, highlight=False, soft_wrap=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, ws="none", server_header=False, timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listening])
