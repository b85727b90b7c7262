"""fedtailor's ServerApp and ClientApp, and messages as Flower's records."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ...config import load
from ...errors import UserError
from ...runs.execute import Watcher
from ...runs.serve import serve
from ..crowd import Waiting
from ..parcel import LAYOUT_LIMIT, Parcel, Refused
from ..site import Site
from . import TooLarge, at_most

POLL = 0.1  # seconds between looks for a reply
STYPE = "fedtailor"  # one array of bytes; Flower moves it as it is
WHOLE = 4 << 20  # bytes up to which a parcel is not cut into chunks


def to_content(parcel: Parcel) -> RecordDict:
    """Every object of a message is a request at each of four hops: a small parcel is one object, a large one chunks."""
    if parcel.size <= WHOLE:
        return RecordDict({"parcel": ConfigRecord({"layout": parcel.layout, "data": parcel.data})})
    array = Array(dtype="uint8", shape=(len(parcel.data),), stype=STYPE, data=parcel.data)
    return RecordDict({"data": ArrayRecord({"data": array}), "parcel": ConfigRecord({"layout": parcel.layout})})


def to_parcel(content: RecordDict) -> Parcel:
    """The parcel of a message; an empty one, which nobody accepts, where it holds something else."""
    arrays, record = content.get("data"), content.get("parcel")
    if not isinstance(record, ConfigRecord):
        return Parcel("", b"")
    layout, data = record.get("layout"), record.get("data")
    if isinstance(arrays, ArrayRecord) and "data" in arrays and arrays["data"].stype == STYPE:
        data = arrays["data"].data
    if not isinstance(layout, str) or not isinstance(data, bytes):
        return Parcel("", b"")
    return Parcel(layout, data)


class GridPost:
    """A `Post` over Flower's grid. `names` says whose keys are registered for the nodes; without it any may come."""

    def __init__(self, grid: Grid, names: Mapping[int, str] | None = None) -> None:
        self.grid, self.names = grid, names
        self._come: SimpleQueue[tuple[str, Parcel | Refused | str]] = SimpleQueue()

    def nodes(self) -> Mapping[int, str]:
        here = list(self.grid.get_node_ids())
        if self.names is None:
            return dict.fromkeys(here, "")
        return {node: self.names[node] for node in here if node in self.names}

    def send(self, parcels: Mapping[int, Parcel]) -> Mapping[int, str]:
        found = {}
        for node, parcel in parcels.items():  # one by one: the first client works while the next one's is on its way
            message = Message(to_content(parcel), dst_node_id=node, message_type="train")
            (number,) = self.grid.push_messages([message])
            if number:
                found[node] = number
                limit = 2 * parcel.size + LAYOUT_LIMIT  # a reply holds little beside what its client was sent
                threading.Thread(target=self._fetch, args=(number, limit), daemon=True).start()
        return found

    def receive(self, ids: Collection[str]) -> Sequence[tuple[str, Parcel | Refused | str]]:
        found = []
        while not self._come.empty():
            found.append(self._come.get())
        return [(number, content) for number, content in found if number in ids]

    def _fetch(self, number: str, limit: int) -> None:
        """Waits for one reply. Each has its own thread: fetching one can hang when its sender does."""
        began = time.monotonic()
        while True:
            try:
                with at_most(limit):
                    found = list(self.grid.pull_messages([number]))
            except TooLarge as error:
                self._come.put((number, Refused(str(error))))
                return
            except Exception as error:
                self._come.put((number, f"the message is lost ({type(error).__name__})"))
                return
            if found:
                (m,) = found
                failed = m.has_error()
                self._come.put((number, (m.error.reason or "unknown") if failed else to_parcel(m.content)))
                return
            time.sleep(min(2.0, max(POLL, (time.monotonic() - began) / 20)))  # a long wait may end a little later


class PrintWatcher(Watcher):
    """Says what happens in Flower's log."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def round(self, number: int, facts: dict[str, float]) -> None:
        print(f"round {number}: " + ", ".join(f"{k} {v:.4g}" for k, v in facts.items()), flush=True)


server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    options: dict[str, Any] = dict(context.run_config)
    try:
        config = load(str(options["config"]), shlex.split(str(options["set"])))
        waiting = Waiting(float(options["deadline"]), int(options["quorum"]))
        serve(config, Path(str(options["out"])), GridPost(grid), waiting=waiting, watch=PrintWatcher())
    except UserError as error:
        raise RuntimeError(str(error)) from None  # what `flwr log` shows


@client_app.train()
def _answer(message: Message, context: Context) -> Message:
    node: dict[str, Any] = dict(context.node_config)
    name = str(node.get("name") or f"client-{int(node.get('partition-id', 0)):03d}")
    folder = Path(str(node.get("state") or Path(str(context.run_config["state"])) / name))
    site = Site(name, folder, str(node.get("data", "")), str(node.get("data-dir", "")))
    return Message(to_content(site.answer(to_parcel(message.content))), reply_to=message)
