"""A client on its own machine: its data, its memory and its network on its own disk, and what it answers a server.

Nothing here knows how messages travel. A request is read, checked and done with the code that is installed here; what
goes back is what the method's reply holds, accuracies, and nothing else. What went wrong is told in full on this
machine and in one word to the server.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..config import Config
from ..config import load as load_config
from ..data import partition as partitions
from ..data.dataset import Dataset
from ..data.federation import Store, stores
from ..data.partition import TEST, TRAIN, VAL, Partition
from ..data.pixels import Reading
from ..data.public import require_foreign, with_public
from ..data.rules import split_of
from ..data.sources import load as load_data
from ..errors import UserError, shown
from ..evaluate import Kept, finish, personal_rows, scores
from ..fleet.fleet import Device
from ..method import Job, Method, Reply, Seat
from ..registry import code_in
from ..runs.alone import Offered, deal_of, part_of, write_alone
from ..spaces.base import Space
from ..values import Value, on_device, read_value, write_value
from .client import Client
from .local import LocalEngine
from .parcel import Parcel, Refused, unpack
from .wire import Evaluate, Evaluated, Request, Response, Work, Worked, check_declared, describe, read_request

PUBLIC = "public.safetensors"
PROBLEMS = {
    "request": "it did not accept the request",
    "data": "its data cannot be used",
    "memory": "its memory is lost",
    "disk": "its disk cannot be written",
    "work": "its work failed",
    "undeclared": "it kept back a reply that holds more than the method declares",
}


class Problem(Exception):
    """Something that stops a client; the server learns the kind alone."""

    def __init__(self, kind: str, error: Exception) -> None:
        super().__init__(str(error))
        self.kind = kind


@dataclass(frozen=True)
class Desk:
    """What a client needs for one run, ready."""

    run: str
    config: Config
    job: Job
    seat: Seat
    method: Method
    own: Dataset  # the client's images, labels numbered as in the run
    deal: Partition  # of them, into splits
    learn: Store
    test: Store
    public: np.ndarray | None = None  # images of the public set


class Site:
    """One client's machine.

    At the end of a run it keeps a run folder of its own, with its data and its network; `over` holds the new ones.
    `data` names the client's own data, all of it; without it, the client takes its share of the run's data set, as the
    run's partition deals it. `trust` lists method, space and net files of the client's own that a run may name. On a
    processor it computes in so many `threads`; numbers are those of a run on one machine, bit for bit, with one.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        data: str = "",
        data_dir: str = "",
        device: str = "cpu",
        trust: Collection[str] = (),
        say: Callable[[str], None] = print,
        threads: int = 1,
    ) -> None:
        self.name, self.folder, self.data, self.data_dir = name, folder, data, data_dir
        self.trust = trust
        self.say: Callable[[str], None] = lambda text: say(shown(text))  # what a server sends may be quoted in it
        self.engine = LocalEngine(torch.device(device), 1, threads=threads)
        self.over: SimpleQueue[Path] = SimpleQueue()
        self._desks: dict[tuple[Any, ...], Desk] = {}  # of the latest run
        self._sets: dict[tuple[str, Reading], Dataset] = {}

    def answer(self, parcel: Parcel) -> Parcel:
        """The response to a request, whatever happens."""
        value: dict[str, Any] = {}
        title = ""
        try:
            value = unpack(parcel)
            request = read_request(value, self._space)
            title = _title(request)
            response = self._respond(request)
        except (Problem, Refused) as error:
            kind = error.kind if isinstance(error, Problem) else "request"
            self.say(f"{title}{PROBLEMS[kind]}: {error}")
            run, number = (str(value.get(key, "")) for key in ("run", "number"))
            response = Response(run, number, self.name, problem=kind)
        packed = response.pack()
        self.say(f"{title}received {_size(parcel.size)}, sends {_size(packed.size)}: {describe(response)}")
        return packed

    def _respond(self, request: Request) -> Response:
        config = self._config(request.config)
        if request.seat is None:
            about = self._about(config, request.classes)
            self._take_public(config, request)
            return Response(request.run, request.number, self.name, about=about)
        if request.seat.name != self.name:
            raise Refused(f"it is for '{request.seat.name}', this is '{self.name}'")
        desk = self._desk(config, request)
        folder = self.folder / _folder_name(request.run)
        evaluated = self._evaluate(desk, request.evaluate, folder) if request.evaluate else None
        worked = self._work(desk, request.work, folder, request.keep) if request.work else None
        return Response(request.run, request.number, self.name, {}, evaluated, worked)

    # requests ---------------------------------------------------------------------------------------------------

    def _evaluate(self, desk: Desk, order: Evaluate, folder: Path) -> Evaluated:
        memory = self._memory(folder, order.memory)
        splits = {"val": desk.learn.split(0, VAL)} | ({"test": desk.test.split(0, TEST)} if order.last else {})
        splits = {name: split for name, split in splits.items() if split.size}
        keeper = self._client(desk, memory, order.round, keeping=True)
        label = f"personal network after round {order.round}"
        found, kept = self._run(label, finish(desk.method, order.offer, keeper, splits, order.last, tune=order.tune))
        shared: dict[str, float] = {}
        if order.shared is not None:
            client = self._client(desk, memory, order.round)
            model = desk.method.build(order.shared, client)
            shared = self._run("the server's model", scores(client, model, splits))
        if order.last:
            self._keep(desk, Offered(order.offer, memory, order.round), kept, found, folder)
        # an arch that the client found for itself is its own business, and so is what it costs
        known = order.last and kept.space == desk.job.space and kept.arch == order.offer.arch
        return Evaluated(found, shared, dict(kept.facts) if known else {})

    def _keep(self, desk: Desk, offered: Offered, kept: Kept, found: dict[str, float], folder: Path) -> None:
        """Writes the client's own run folder."""
        seat, config = desk.seat, desk.config
        device = Device(seat.profile, seat.budget)
        rows = personal_rows(offered.round, seat.id, "personal", found, kept.facts)
        facts = {"joined": {"run": desk.run, "source": desk.own.name}, "normalised_as": desk.own.name}
        where = self.engine.device
        try:
            write_alone(
                *(folder, config, desk.method, desk.own, desk.deal, seat, device, offered, kept, rows, where, facts),
                public=desk.public,
            )
        except UserError as error:
            raise Problem("disk", error) from error
        self.over.put(folder)

    def _work(self, desk: Desk, order: Work, folder: Path, keep: int) -> Worked:
        client = self._client(desk, self._memory(folder, order.memory), order.round)
        method = desk.method.onboarding()[0] if order.joining else desk.method
        reply: Reply = self._run(f"round {order.round}", method.work(order.task, client))
        facts = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in reply.facts.items()}
        reply = dataclasses.replace(reply, facts=facts)
        try:
            check_declared(reply, desk.method.declared.up)
        except Refused as error:
            raise Problem("undeclared", error) from error
        if client.memory:
            for path in _memories(folder):
                written = int(path.stem.partition("-")[2])
                # of rounds that the server has gone back behind, or whose replies it did not use
                if written > order.round or 0 < order.memory < written < order.round:
                    path.unlink()
            self._write(_memory_path(folder, order.round), client.memory)
            for path in _memories(folder)[:-keep]:
                path.unlink()
        return Worked(reply, client.flops, bool(client.memory))

    def _client(self, desk: Desk, memory: dict[str, Any], round: int, keeping: bool = False) -> Client:
        train, val = (desk.learn.split(0, which) for which in (TRAIN, VAL))
        return Client(desk.job, desk.seat, train, val, memory, round, self.engine, keeping, desk.learn.public)

    def _run(self, label: str, work: Any) -> Any:
        try:
            found = self.engine.run([(label, work)])[0]
            self.engine.settle()
            return found
        except Exception as error:
            raise Problem("work", error) from error

    # memory -----------------------------------------------------------------------------------------------------

    def _memory(self, folder: Path, round: int) -> dict[str, Any]:
        """The memory as of the end of a round."""
        if round == 0:
            return {}
        try:
            return on_device(read_value(_memory_path(folder, round)), self.engine.device)
        except UserError as error:
            raise Problem("memory", error) from error

    def _write(self, path: Path, value: Value) -> None:
        try:
            write_value(path, value)
        except UserError as error:
            raise Problem("disk", error) from error

    # the run ----------------------------------------------------------------------------------------------------

    def _config(self, text: str) -> Config:
        """The run's configuration; code that is not installed here is run only if this client's owner said so."""
        try:
            table = tomllib.loads(text)
            for kind in ("method", "space", "net"):  # before anything is looked up: that would run the code
                for name in code_in(_resolved(table.get(kind))):
                    if name not in self.trust:
                        raise UserError(f"the run names the code '{name}', which --trust does not list.")
            config = load_config(table)
            self.engine.compute_in(config.precision)
            return config
        except (tomllib.TOMLDecodeError, UserError) as error:
            raise Problem("request", error) from error

    def _space(self, text: str, shape: tuple[int, int, int], classes: int) -> Space:
        return self._config(text).make_space(shape, classes)

    def _dataset(self, config: Config) -> Dataset:
        """The client's data, its pictures made into the size and colour that the run asks for."""
        key = (self.data or config.data.name, config.data.reading)
        if key not in self._sets:
            folder = self.data_dir or ("" if self.data else config.data.dir)
            try:
                self._sets = {key: load_data(key[0], Path(folder) if folder else None, key[1], self.say)}
            except (UserError, OSError) as error:
                raise Problem("data", error) from error
        return self._sets[key]

    def _share(self, config: Config, dataset: Dataset) -> tuple[int, Partition]:
        """The client's place and part in the run's own partition."""
        try:
            partition = partitions.make(dataset, config.make_partition(), config.clients, config.seed)
        except UserError as error:
            raise Problem("data", error) from error
        if self.name not in partition.names:
            known = f"{partition.names[0]} to {partition.names[-1]}"
            error = UserError(f"the run's partition has no client '{self.name}', only {known}. Name its data: --data.")
            raise Problem("data", error)
        return partition.names.index(self.name), partition

    def _about(self, config: Config, classes: tuple[str, ...]) -> dict[str, Value]:
        dataset = self._dataset(config)
        if classes:
            _in_classes(dataset, classes)
        if self.data:
            rules, known = config.make_partition(), len(dataset.classes)
            split = split_of(0, dataset.labels, known, rules, config.seed, dataset.split)
            samples = int((split == TRAIN).sum())  # as many whatever the seat
        else:
            place, partition = self._share(config, dataset)
            samples = len(partition.indices(place, TRAIN))
        if samples < 1:
            raise Problem("data", UserError(f"{len(dataset)} images leave none to train on."))
        versions = {"fedtailor": __version__, "torch": torch.__version__}
        return {"samples": samples, "shape": list(dataset.shape), "classes": list(dataset.classes), **versions}

    def _take_public(self, config: Config, request: Request) -> None:
        """Keeps the public set that a run brings along, unless some of it is this client's own."""
        if request.public is None:
            return
        dataset = self._dataset(config)
        own = dataset.images
        if not self.data:
            place, partition = self._share(config, dataset)
            own = own[partition.owner == place]
        try:
            require_foreign(request.public.numpy(), own)
        except UserError as error:
            raise Problem("data", error) from error
        folder = self.folder / _folder_name(request.run)
        self._write(folder / PUBLIC, {"images": request.public})

    def _public(self, config: Config, run: str) -> np.ndarray | None:
        """The public set that the run has brought along; None where it has none."""
        if not config.public.name:
            return None
        try:
            return read_value(self.folder / _folder_name(run) / PUBLIC)["images"].numpy()
        except UserError as error:
            raise Problem("data", error) from error

    def _desk(self, config: Config, request: Request) -> Desk:
        key = (request.run, request.config, request.classes, request.seat)
        if key not in self._desks:
            self._desks = {key: self._make_desk(config, request)}
        return self._desks[key]

    def _make_desk(self, config: Config, request: Request) -> Desk:
        seat = request.seat
        assert seat is not None
        dataset = self._dataset(config)
        if self.data:
            own = _in_classes(dataset, request.classes)
            split = split_of(seat.id, own.labels, len(request.classes), config.make_partition(), config.seed, own.split)
        else:
            place, partition = self._share(config, dataset)
            if place != seat.id:
                raise Refused(f"it gives '{self.name}' place {seat.id}, the partition gives it {place}")
            mine = np.flatnonzero(partition.owner == place)
            own, split = part_of(dataset, mine), partition.split[mine]
        deal = deal_of(own, split, request.run, self.name)
        public = self._public(config, request.run)
        count = 0 if public is None else len(public)
        plan = (config.clients, config.participants, config.rounds, config.seed, config.local)
        job = Job(seat.space, (seat,), *plan, public=count)
        learn, test = stores(own, deal, self.engine.device)
        learn = with_public(learn, public)
        return Desk(request.run, config, job, seat, config.make_method(), own, deal, learn, test, public)


def _resolved(table: object) -> object:
    """A table of the config; a server's config has one of each kind, never a list of them."""
    if table is not None and not isinstance(table, dict):
        raise UserError("the run's configuration is not resolved.")
    return table


def _in_classes(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The data with labels numbered as in the federation, where a client may lack some classes."""
    missing = [c for c in dataset.classes if c not in classes]
    if missing:
        raise Problem("data", UserError(f"the run knows no class '{missing[0]}', only {', '.join(classes)}."))
    places = np.array([classes.index(c) for c in dataset.classes])
    return dataclasses.replace(dataset, labels=places[dataset.labels], classes=classes)


def _title(request: Request) -> str:
    if request.work:
        return f"round {request.work.round}: "
    return f"after round {request.evaluate.round}: " if request.evaluate else "hello: "


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _folder_name(run: str) -> str:
    if not re.fullmatch(r"[\w-]{1,80}", run):
        raise Refused("its run has no proper name")
    return run


def _memory_path(folder: Path, round: int) -> Path:
    return folder / f"memory-{round:06d}.safetensors"


def _memories(folder: Path) -> list[Path]:
    return sorted(folder.glob("memory-*.safetensors"))
