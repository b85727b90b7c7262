"""One run from a config to a finished folder: start or resume, rounds, checkpoints, the last evaluation."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ..config import Config
from ..config import load as load_config
from ..data import partition as partitions
from ..data.batches import trained_on
from ..data.dataset import Dataset, fingerprints
from ..data.federation import Store, stores
from ..data.partition import TRAIN, Partition
from ..data.public import public_images, with_public
from ..data.sources import load as load_data
from ..data.sources import own
from ..engine.local import LocalEngine
from ..engine.loop import Event, Federation, State
from ..errors import UserError
from ..evaluate import Kept, evaluate, mean_accuracy, network_value
from ..fleet import fleet as fleets
from ..fleet.budget import require_feasible
from ..method import Job, Method, Seat
from ..nets.base import net_of
from ..spaces.base import Arch, Space, Weights
from ..values import read_value, write_bytes, write_value
from . import checkpoint
from .events import EventLog
from .facts import describe_device, facts_of, read_facts, write_facts
from .folder import held, require_free
from .given import give
from .live import Live

Say = Callable[[str], None]
Report = Callable[[Event], None]


class Watcher:
    """Follows a run; the default says nothing."""

    def begin(self, title: str, done: int, rounds: int) -> None: ...

    def round(self, number: int, facts: dict[str, float]) -> None: ...

    def events(self, number: int, events: Sequence[Event]) -> None:
        """The rows of a whole round, or those of the last evaluation, before they reach the log."""

    def say(self, text: str) -> None: ...

    def clients(self, states: dict[str, str]) -> None:
        """How each client of a server is doing, whenever that changes."""

    def end(self) -> None: ...


class Driver(Protocol):
    """Whatever runs the rounds: the engine of this machine, or a server of real clients."""

    precision: str  # of the arithmetic

    def begin(self) -> State: ...

    def follow(self, told: Callable[[int, Sequence[int]], None]) -> None:
        """Has every round that begins told, with its clients."""
        ...

    def rounds(self, state: State, report: Report, due: Callable[[int], bool]) -> Iterator[State]:
        """The remaining rounds; where `due` says so, with evaluations on val after a round."""
        ...

    def finish(self, state: State) -> tuple[list[Event], list[Kept]]:
        """The evaluation after the last round, and the networks that may be kept here."""
        ...

    def close(self) -> None: ...


class LocalDriver:
    """All clients on this machine."""

    def __init__(self, federation: Federation, test: Store) -> None:
        self.federation, self.test = federation, test
        self.begin, self.follow, self.close = federation.begin, federation.follow, federation.engine.close
        self.precision = federation.engine.precision

    def rounds(self, state: State, report: Report, due: Callable[[int], bool]) -> Iterator[State]:
        for _ in self.federation.rounds(state, report):
            for event in evaluate(self.federation, state, None)[0] if due(state.round) else ():
                report(event)
            yield state

    def finish(self, state: State) -> tuple[list[Event], list[Kept]]:
        return evaluate(self.federation, state, self.test)


@dataclass(frozen=True)
class Setup:
    """A config made into objects; nothing is written yet."""

    config: Config
    method: Method
    dataset: Dataset
    partition: Partition
    job: Job
    fleet: fleets.Fleet
    public: np.ndarray | None = None  # images of the public set

    def federation(
        self, device: torch.device, workers: int, engine: str = "auto", say: Say = print
    ) -> tuple[Federation, Store]:
        learn, test = stores(self.dataset, self.partition, device)
        learn = with_public(learn, self.public)
        runs = make_engine(device, workers, engine, self.config.precision, say)
        space, batch = self.job.space, self.config.local.batch
        runs.plan(space.cost(space.largest), batch, self.job.participants)
        return Federation(self.job, self.method, learn, runs, self.fleet, self.config.make_fleet()), test


def prepare(config: Config, saved: Path | None = None, say: Say | None = None) -> Setup:
    """Loads the data and checks everything that can be wrong. `saved` is a run's own partition file."""
    method = config.make_method()
    folder = Path(config.data.dir) if config.data.dir else None
    name = data_of(saved.parent, config) if saved else config.data.name
    dataset = load_data(name, folder, config.data.reading, say)
    if saved:
        partition = Partition.load(saved)
        partition.require(dataset)
    else:
        partition = partitions.make(dataset, config.make_partition(), config.clients, config.seed)
    samples = [len(partition.indices(i, TRAIN)) for i in range(partition.clients + partition.new_clients)]
    public = public_images(config.public, dataset, partition, folder, config.data.reading, config.seed)
    job, fleet = make_job(config, partition.names, samples, dataset.shape, len(dataset.classes))
    job = replace(job, clients=partition.clients, public=0 if public is None else len(public))
    method.check(job)
    return Setup(config, method, dataset, partition, job, fleet, public)


def data_of(folder: Path, config: Config) -> str:
    """Where a run's data is: in its folder, wherever that has been moved to, or what the config names."""
    beside = folder / "data.npz"
    return f"npz:{beside}" if beside.is_file() else config.data.name


def make_job(
    config: Config, names: Sequence[str], samples: Sequence[int], shape: tuple[int, int, int], classes: int
) -> tuple[Job, fleets.Fleet]:
    """The job of a config with clients of these names and numbers of training samples, and their devices."""
    space = config.make_space(shape, classes)
    _require_size(space)
    fleet = fleets.make(config.make_fleet(), len(names), config.seed)
    seats = make_seats(config, space, list(zip(names, samples, strict=True)), fleet)
    return Job(space, seats, config.clients, config.participants, config.rounds, config.seed, config.local), fleet


def _require_size(space: Space) -> None:
    """Raises `UserError` where the space has no network for images of this size."""
    space.require_choices()
    for arch in (space.largest, space.smallest):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch mentions layers without weights, then fails on them
                space.cost(arch)
        except UserError:
            raise
        except (RuntimeError, ValueError, ArithmeticError, IndexError) as error:
            channels, height, width = space.input
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"'{space.name}' cannot take images of {width}x{height} with {channels} channels ({reason}). Make "
                "pictures larger with data.size, or choose another space or net."
            ) from error


def make_seats(
    config: Config, space: Space, clients: Sequence[tuple[str, int]], fleet: fleets.Fleet
) -> tuple[Seat, ...]:
    """What the server knows of its clients, given as names and numbers of training images, and of their devices."""
    largest, batch, rules = space.cost(space.largest), config.local.batch, config.make_fleet()
    seats = []
    for i, ((name, samples), device) in enumerate(zip(clients, fleet, strict=True)):
        images = trained_on(samples, batch, config.local.epochs)
        profile = device.profile.sharing(config.participants) if rules.shared_link else device.profile
        if rules.hard:
            require_feasible(space, device.budget, name, batch, profile, images)
        budget = device.budget.absolute(largest, batch, profile, images)
        seats.append(Seat(i, name, samples, profile, budget, rules.hard, space, batch, images))
    if config.archs:
        seats = give(config.archs, seats, config.seed)
    return tuple(seats)


def make_engine(
    device: torch.device, workers: int, name: str = "auto", precision: str = "fp32", say: Say = print
) -> LocalEngine:
    """The engine for a device; `eager` is the plain one, client after client."""
    require_how(name, workers)
    if device.type == "cuda" and name == "auto":
        from ..engine.cuda import CudaEngine

        return CudaEngine(device, precision, say=say)
    return LocalEngine(device, workers, precision)


def require_how(engine: str, workers: int) -> None:
    """Raises where no engine of this kind can be made; called before anything is written."""
    if engine not in ("auto", "eager"):
        raise UserError(f"--engine {engine}: use auto or eager.")
    if workers < 0:
        raise UserError(f"--workers {workers}: give the number of clients to train at once, or 0 for one per core.")


def choose_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: use auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu, or see 'fedtailor doctor'.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def start(
    config: Config,
    out: Path,
    device: str = "auto",
    workers: int = 0,
    watch: Watcher | None = None,
    command: str = "",
    engine: str = "auto",
) -> Path:
    """Runs a config in a new folder; returns the folder."""
    require_free(out)
    with held(out):
        require_free(out)  # nobody was quicker
        chosen = choose_device(device)
        require_how(engine, workers)
        setup = prepare(config, say=watch.say if watch else None)
        facts = facts_of(setup, chosen, command)
        write_bytes(out / "config.toml", config.to_toml().encode())
        setup.partition.save(out / "partition.npz")
        if own(config.data.name):
            buffer = io.BytesIO()
            np.save(buffer, fingerprints(setup.dataset.images))
            write_bytes(out / "fingerprints.npy", buffer.getvalue())
        write_facts(out, facts)
        return _drive(setup, out, chosen, workers, watch or Watcher(), engine)


def resume(
    out: Path, device: str = "auto", workers: int = 0, watch: Watcher | None = None, engine: str = "auto"
) -> Path:
    """Continues a run from its newest whole checkpoint; a finished run is left as it is."""
    facts = read_facts(out)
    if facts["status"] == "done":
        (watch or Watcher()).say(f"{out} is finished already: nothing to resume.")
        return out
    if facts.get("served"):
        raise UserError(f"{out} is the run of a server. Continue it with 'fedtailor serve ... --out {out}'.")
    if not (out / "config.toml").is_file() or not (out / "partition.npz").is_file():
        raise UserError(f"{out} was stopped before its setup was saved. Delete the folder and start the run again.")
    chosen = choose_device(device)
    require_how(engine, workers)
    with held(out):
        setup = prepare(load_config(out / "config.toml"), out / "partition.npz")
        return _drive(setup, out, chosen, workers, watch or Watcher(), engine)


def _drive(setup: Setup, out: Path, device: torch.device, workers: int, watch: Watcher, engine: str) -> Path:
    driver = LocalDriver(*setup.federation(device, workers, engine, watch.say))
    return drive(driver, setup.config, setup.job, out, device, watch)


def cadence(config: Config) -> tuple[int, int]:
    """Rounds between evaluations on val, and between checkpoints."""
    tenth = max(1, config.rounds // 10)
    return config.evaluate_every or tenth, config.checkpoint_every or tenth


def drive(driver: Driver, config: Config, job: Job, out: Path, device: torch.device, watch: Watcher) -> Path:
    """Runs what is left of a run in its folder, to the end."""
    found = checkpoint.load(out / "checkpoints", job, device, watch.say)
    state, log_bytes = found if found else (driver.begin(), None)
    checkpoint.go_back(out / "checkpoints", state.round)
    log = EventLog(out / "events.csv", log_bytes)
    facts = {**read_facts(out), "status": "running", "device": describe_device(device)}
    facts["precision"] = driver.precision
    write_facts(out, facts)
    began, before = time.perf_counter(), float(facts["seconds"])
    evaluate_every, save_every = cadence(config)
    live = Live(out, config.rounds, state.round)
    driver.follow(live.working)
    sizes = [len(d.options) for d in job.space.dimensions]

    def due(number: int) -> bool:
        return 0 < number < config.rounds and number % evaluate_every == 0

    def save(status: str) -> None:
        checkpoint.save(out / "checkpoints", state, log.flush())
        seconds = before + time.perf_counter() - began
        write_facts(out, {**facts, "status": status, "rounds_done": state.round, "seconds": seconds})

    watch.begin(f"{config.method['name']} on {config.data.name}", state.round, config.rounds)
    pending: list[Event] = []  # rows of the round in flight: they reach the log when it is whole
    logged = state.round  # rounds whose rows are in the log
    try:
        if not found:
            save("running")
        for _ in driver.rounds(state, pending.append, due):
            watch.round(state.round, _progress(pending))
            watch.events(state.round, pending)
            live.policies(state.round, state.server.values, sizes)
            _commit(log, pending)
            logged = state.round
            if state.round % save_every == 0 or state.round == config.rounds:
                save("running")
        events, kept = driver.finish(state)
        watch.events(state.round, events)
        _commit(log, events)
        save_networks(out / "nets", job.space, kept)
        log.flush()
        seconds = before + time.perf_counter() - began
        write_facts(out, {**facts, "status": "done", "rounds_done": state.round, "seconds": seconds})
    except KeyboardInterrupt:
        if state.round == logged and not pending:  # else the last checkpoint stands, and its rounds are run again
            save("stopped")
        raise
    finally:
        watch.end()
        driver.close()
        log.close()
        live.end()
    return out


def _commit(log: EventLog, events: list[Event]) -> None:
    for event in events:
        log.add(event)
    log.show()
    events.clear()


def _progress(events: list[Event]) -> dict[str, float]:
    """The few numbers of a round that a progress line shows."""
    losses = [float(e.value) for e in events if e.metric == "loss"]
    found = {"loss": sum(losses) / len(losses)} if losses else {}
    for kind in ("personal", "global"):
        value = mean_accuracy(events, f"{kind}_accuracy")
        if value is not None:
            found[kind] = value
    return found


def save_networks(folder: Path, space: Space, kept: Sequence[Kept]) -> None:
    """One value file per client: its arch and weights, enough to build the network again."""
    for net in kept:
        write_value(folder / f"{net.client:06d}.safetensors", network_value(net, space))


def open_space(out: Path) -> Space:
    """The space of a run, without its data."""
    facts = read_facts(out)
    if "input" not in facts:
        raise UserError(f"{out} was made by an older fedtailor, which did not write down the images' shape.")
    channels, height, width = facts["input"]
    return load_config(out / "config.toml").make_space((channels, height, width), len(facts["classes"]))


def read_networks(out: Path, space: Space) -> dict[int, tuple[Space, Arch, Weights]]:
    """The networks in a run's folder by client, each with the space it is a point of: the run's, or its own."""
    found: dict[int, tuple[Space, Arch, Weights]] = {}
    for path in sorted((out / "nets").glob("*.safetensors")):
        value = read_value(path)
        own = net_of(value["net"], space.input, space.classes) if "net" in value else space
        found[int(path.stem)] = own, tuple(value["arch"]), value["weights"]
    if not found and read_facts(out).get("served"):
        raise UserError(
            f"{out} is the run of a server: networks are with its clients, who export them from their own folders."
        )
    if not found:
        raise UserError(f"{out} holds no networks: they are saved when a run ends. 'fedtailor resume {out}' goes on.")
    return found
