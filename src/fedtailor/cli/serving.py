"""`fedtailor certs`, `serve` and `join`: a federation of real machines."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import UserError

console = Console()
EXPLAINED = (
    "The certificate in {0}/server tells clients that they talk to your server and encrypts all traffic; it is valid "
    "for {1} days and for the hosts you named. Each node's key, in {0}/NAME, tells the server which client calls: hand "
    "every client its own folder over a safe way, and nobody else's. {0}/authority signs new certificates; the server "
    "does not need it, so keep it on a stick in a drawer. To shut a client out, delete {0}/server/nodes/NAME.pub and "
    "start the server again. 'fedtailor certs' adds what is missing when you run it again, and renews the server's "
    "certificate when hosts are named. It makes a key that was lost anew when NAME's .pub file is gone."
)
INSECURE = (
    "[bold red]warning:[/] --insecure: everything travels in clear text, and anybody who reaches the port can take "
    "part under any name. For trials on one machine only."
)
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: for trials on one machine only.")]
Tls = Annotated[Path | None, typer.Option("--tls", metavar="DIR", help="Folder made by `fedtailor certs`.")]


def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address clients call the server by. Repeatable.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Make keys for this many nodes: client-000, client-001, ...")] = 0,
    node: Annotated[list[str] | None, typer.Option(help="Make a key for a node of this name. Repeatable.")] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = 825,
) -> None:
    """Make the keys and certificates of a federation.

    Examples:

    - `fedtailor certs keys --host fl.example.org --node hospital-1 --node hospital-2`
    - `fedtailor certs keys --host 127.0.0.1 --nodes 4`
    """
    _require_flower()
    from ..certificates import make_certificates

    names = [f"client-{i:03d}" for i in range(nodes)] + list(node or [])
    made = make_certificates(folder, host or [], names, days)
    console.print(f"made in {folder}: {', '.join(made) or 'nothing, all of it is there'}", soft_wrap=True)
    console.print(EXPLAINED.format(folder, days), soft_wrap=True, highlight=False)


def serve_command(
    config: Annotated[str, typer.Argument(help="A preset or a TOML file; with --onboard, a served run's folder.")],
    tls: Tls = None,
    insecure: Insecure = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the run, new or to be continued; default: a new one under runs/."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = all.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    start_with: Annotated[int, typer.Option(help="Begin when this many clients are there; 0 = all.")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds until a round goes on without late clients; 0 = wait.")] = 0,
    quorum: Annotated[int, typer.Option(help="Replies without which a round does not end.")] = 1,
    onboard: Annotated[int, typer.Option(help="Take in so many clients that were never in the run, then end.")] = 0,
    profile: Annotated[str, typer.Option(help="With --onboard: the newcomers' device; default: the fleet's.")] = "",
    log: Annotated[
        list[str] | None,
        typer.Option("--log", metavar="csv|tensorboard|mlflow", help="Also log rounds' numbers there. Repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")] = False,
) -> None:
    """Run a config with clients on other machines.

    Starts Flower's SuperLink with TLS, lets in the nodes that have keys in DIR, and runs the rounds when they are
    there. A run that was stopped or killed goes on when its folder is given again.

    With --onboard it gives newcomers their networks in the method's way, from a run that was served, or that is being
    served on another port. The run is not changed.

    Examples:

    - `fedtailor serve hospitals.toml --tls keys --out runs/hospitals`
    - `fedtailor serve runs/hospitals --tls keys --onboard 1`
    """
    _require_flower()
    from ..api import free_folder
    from ..certificates import node_keys, server_folder
    from ..config import load
    from ..engine.crowd import Waiting
    from ..engine.flower.apps import GridPost
    from ..engine.flower.link import SuperLink
    from ..runs.facts import read_facts
    from ..runs.folder import held
    from ..runs.logs import with_logs
    from ..runs.results import Results
    from ..runs.serve import serve
    from ..runs.welcome import welcome
    from .main import _write_report
    from .progress import crowd_watcher

    _require_safe(tls, insecure)
    keys = server_folder(tls) if tls else None
    if onboard:
        folder, loaded, there = Path(config), None, set(read_facts(Path(config))["client_names"])
    else:
        loaded, there = load(config, list(changes or [])), set()
        folder = out or free_folder(Path("runs"), loaded.data.name, loaded.method["name"])
    with _ended_by_signals(), contextlib.nullcontext() if onboard else held(folder):
        watch = with_logs(crowd_watcher(console, quiet), log or [], folder)
        link = SuperLink(host, port, keys, folder.parent / f".superlink-{port}", watch.say)
        try:
            link.start()
            names = link.register(node_keys(keys)) if keys else None
            names = names and {node: name for node, name in names.items() if name not in there}
            if names == {}:
                raise UserError(f"{tls} has no key of a newcomer. Make one: 'fedtailor certs {tls} --node NAME'")
            watch.say(f"listening on {host}:{port}" + (f" for {', '.join(names.values())}" if names else ""))
            with link.run() as grid:
                post = GridPost(grid, names)
                if loaded is None:
                    welcome(folder, post, onboard, profile, watch, deadline)
                    return
                known = tuple(names.values()) if names else ()
                serve(loaded, folder, post, known, start_with, Waiting(deadline, quorum), watch)
        except KeyboardInterrupt:
            again = "" if onboard else f" Continue with the same command and --out {folder}"
            console.print(f"\nStopped.{again}", soft_wrap=True)
            raise typer.Exit(130) from None
        finally:
            link.close()
    if not quiet:
        console.print(Results.read(folder).table())
    page = _write_report(folder)
    if not quiet:
        console.print(f"run folder: {folder}\nreport: {page}" if page else f"run folder: {folder}", soft_wrap=True)


def join_command(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server.")],
    name: Annotated[str, typer.Option(help="This client's name, as its key is registered.")],
    data: Annotated[
        str, typer.Option(help="This client's own data: folder:DIR, npz:FILE, ... Default: its share of the run's set.")
    ] = "",
    data_dir: Annotated[
        str, typer.Option("--data-dir", help="Folder in which data sets lie; else $FEDTAILOR_DATA.")
    ] = "",
    tls: Tls = None,
    insecure: Insecure = False,
    state: Annotated[Path | None, typer.Option(help="Folder for memory and network; default: clients/NAME.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Cores to train on, without a GPU; 0 = all of the machine's.")] = 1,
    trust: Annotated[
        list[str] | None, typer.Option(help="A method, space or net file of your own that runs may name. Repeatable.")
    ] = None,
    export: Annotated[
        bool, typer.Option("--export/--no-export", help="When a run is over, write a report and an ONNX file.")
    ] = True,
) -> None:
    """Take part in a federation with this machine's data.

    Prints what leaves this machine, message by message. Stays until interrupted and connects again when the server
    was away. Memory and the personal network are files of this machine. Newcomers to a run that is over, or that goes
    on, use the same command.

    Example: `fedtailor join fl.example.org:8000 --name hospital-3 --data folder:/srv/scans --tls hospital-3`
    """
    _require_flower()
    from ..certificates import node_folder
    from ..engine.flower.node import join
    from ..engine.local import cores
    from ..engine.site import Site
    from ..runs.execute import choose_device

    _require_safe(tls, insecure)
    if not re.fullmatch(r"(\[[^\]]+\]|[^:/\s]+):\d{1,5}", address):
        raise UserError(f"'{address}': write it as HOST:PORT, for example fl.example.org:8000.")
    folder = state or Path("clients") / name
    chosen, there = choose_device(device).type, cores()
    if not 0 <= threads <= there:
        raise UserError(f"--threads {threads}: this machine has {there} cores. Give a number up to that, or 0 for all.")

    def say(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    with _alone(folder), _ended_by_signals():
        site = Site(name, folder, data, data_dir, chosen, trust or (), say, threads or there)
        say(f"joins {address}; memory and network are kept in {folder}")
        say(f"data: {data or 'its share of the data set that the run names'}")
        if chosen == "cpu" and there > 1:
            more = ", where nothing else computes on this machine --threads 0 may be faster" if threads == 1 else ""
            say(f"computes on {threads or there} of {there} cores{more}")
        try:
            take_home = partial(_take_home, export=export, say=say)
            join(address, site, node_folder(tls, name) if tls else None, say, take_home)
        except KeyboardInterrupt:
            say("leaves")


def _take_home(folder: Path, export: bool, say: Callable[[str], None]) -> None:
    """What a client does with its folder when a run is over, in processes that give their memory back."""
    say(f"the run is over: this client's network and all that belongs to it are in {folder}")
    wanted = {"report": "matplotlib", "export": "onnx"} if export else {}
    for command, package in wanted.items():
        if find_spec(package) is None:
            say(f"'fedtailor {command} {folder}' needs {package}, which is not installed")
        else:
            subprocess.run([sys.executable, "-m", "fedtailor", command, str(folder)], check=False)


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise UserError("this needs Flower, which is not installed: pip install 'fedtailor[flower]'")


def _require_safe(tls: Path | None, insecure: bool) -> None:
    if tls and insecure:
        raise UserError("--tls and --insecure exclude each other.")
    if not tls and not insecure:
        raise UserError(
            "name the folder with your keys, --tls DIR (made by 'fedtailor certs'), or ask for a federation without "
            "any protection with --insecure."
        )
    if insecure:
        console.print(INSECURE, soft_wrap=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time uses a client's folder."""
    from ..values import disk_error

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it will hold the client's pictures
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise disk_error(folder, error) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder} is in use: a client of this name runs here already.") from None
        yield


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A service is ended like a command: SIGTERM is Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
