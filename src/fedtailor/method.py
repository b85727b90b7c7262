"""The contract: what a method is. Read this page before writing one.

A method is a frozen dataclass of options (paper symbols in comments) with both halves of one paper's algorithm:

    start -> [ ask -> work (on the client) -> merge ] x rounds -> offer -> personal (on the client)

Server state, tasks, replies and client memory are *values*: named tensors and plain numbers. Client work is `async`:
`await client.fit(...)` hands a job to the engine, which decides how the clients of a round share the hardware.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from .card import Card
from .errors import UserError
from .parts import body as body
from .parts import head as head
from .seeds import Key, rng_of, seed_of
from .spaces.base import Arch, Space, Weights
from .spaces.pasting import paste

if TYPE_CHECKING:
    from .config import Local
    from .engine.client import Client
    from .fleet.budget import Budget
    from .fleet.profile import Profile

Fact = int | float | str | bool | Tensor  # a tensor: a number that the engine is still computing


@dataclass(frozen=True)
class Task:
    """What the server sends one client: an arch, the weights cut for it, other named tensors, small facts."""

    weights: Weights = field(default_factory=dict)
    arch: Arch = ()
    extra: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a client sends back. The engine fills in who sent it, its number of samples and its simulated time."""

    weights: Weights = field(default_factory=dict)
    arch: Arch = ()
    extra: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    client: int = -1
    samples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Seat:
    """What the server knows of a client: its place, its number of training samples, its device."""

    id: int
    name: str
    samples: int
    profile: Profile
    budget: Budget  # in absolute numbers
    hard: bool  # whether the budget may never be exceeded, or only prices an arch
    space: Space
    batch: int
    images: int  # trained on in a round
    arch: Arch = ()  # given to the client for the whole run; (): the fixed network, or whatever the method chooses

    def fits(self, arch: Arch) -> bool:
        """Whether the client's hard budget admits the arch."""
        return not self.hard or self.budget.fits(self.space.cost(arch), self.batch, self.profile, self.images)

    def use(self, arch: Arch) -> dict[str, float]:
        """How much of each limit of the budget the arch takes; 1 is all of it."""
        return self.budget.use(self.space.cost(arch), self.batch, self.profile, self.images)


@dataclass(frozen=True)
class Job:
    """What stays the same during a run."""

    space: Space
    seats: tuple[Seat, ...]  # clients that train, then those held out
    clients: int  # how many of them train
    participants: int
    rounds: int
    seed: int
    local: Local
    public: int = 0  # images of the public set, which clients read as the split `public`


class Server:
    """The server's state: named values, read as attributes, never changed in place."""

    def __init__(self, job: Job, round: int = 0, **values: Any) -> None:
        self.job = job
        self.round = round  # rounds finished
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(
                f"the server has no '{name}'; it has {sorted(self.__dict__.get('values', ()))}"
            ) from None

    @property
    def space(self) -> Space:
        return self.job.space

    def replace(self, **values: Any) -> Server:
        return Server(self.job, self.round, **(self.values | values))

    def seed(self, purpose: str, *key: Key) -> int:
        return seed_of(self.job.seed, purpose, self.round, *key)

    def rng(self, purpose: str, *key: Key) -> np.random.Generator:
        """A generator of this round's own for the purpose (and the client, if given)."""
        return rng_of(self.job.seed, purpose, self.round, *key)

    def paste(self, replies: Sequence[Reply], keys: Sequence[str] | None = None, plain: bool = False) -> Weights:
        """`weights` with the replies averaged in, entry by entry, over the clients that own the entry.

        Clients count by their samples, or, where `plain`, all the same.
        """
        parts = [(r.weights, r.arch, 1.0 if plain else float(r.samples)) for r in replies]
        return paste(self.space, self.weights, parts, keys)

    def task(self, client: Seat, **extra: Weights) -> Task:
        """The server's weights for a client: all of them, or cut for the arch that it was given; so is `extra`."""
        found: dict[str, Tensor] = {}
        for name, weights in extra.items():
            found |= pack(name, self.space.part(weights, client.arch))
        return Task(self.space.part(self.weights, client.arch), client.arch, found)

    def whole(self) -> Task | None:
        """The server's weights as one network: the fixed one, or the largest; None where a space has no largest."""
        if self.space.fixed:
            return Task(self.weights)
        return Task(self.weights, self.space.largest) if self.space.ordered() else None


class Method(ABC):
    """Both halves of an algorithm. Subclasses are frozen dataclasses, registered with `@register("method", name)`."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""  # authors, venue, algorithm
    deviations: ClassVar[tuple[str, ...]] = ()  # every departure from the paper
    card: ClassVar[Card] = Card()  # what it sends, keeps and learns
    needs: ClassVar[Literal["net", "space"]] = "net"  # one fixed network, or choices to search among
    net_options: ClassVar[dict[str, Any]] = {}  # of [net], where the net has them and the config leaves them open
    example: ClassVar[dict[str, Any]] = {}  # dotted keys that the demo, or any small run, needs for this method
    staleness: ClassVar[int] = 0  # rounds by which a real client's reply may be late and still be merged; 0: never
    one_network: ClassVar[str] = "it was written for one network"  # why clients cannot be given archs; "": they can

    @property
    def declared(self) -> Card:
        """The card, with what the options change of it: messages are held to this."""
        return self.card

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        """Whether the method can use a kind of space at all."""
        return space.fixed == (cls.needs == "net")

    def check(self, job: Job) -> None:  # noqa: B027
        """Raises `UserError` where this method cannot run the job; called before anything is written."""

    @abstractmethod
    def start(self, job: Job) -> Server:
        """The server's state before round 1."""

    @abstractmethod
    def ask(self, server: Server, client: Seat) -> Task:
        """The task of one participant of this round."""

    @abstractmethod
    async def work(self, task: Task, client: Client) -> Reply:
        """The client's half of a round."""

    @abstractmethod
    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        """The server's state after a round; replies come in client order."""

    def offer(self, server: Server, client: Seat) -> Task:
        """Like `ask`, for keeps: what a client is given to make its personal network from."""
        return self.ask(server, client)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        """The network this client keeps: evaluated, exported, deployed."""
        return self.build(task, client)

    def build(self, task: Task, client: Client) -> nn.Module:
        """The network of a task. Methods whose networks are no points of the run's space say here what they are."""
        return client.build(task)

    def shared(self, server: Server) -> Task | None:
        """The server's own model, evaluated as `global`; None where the method has none."""
        return None

    def at_home(self, client: Seat) -> Method:
        """The method for a folder of this client alone: there its number is 0, so what follows from it is settled."""
        return self

    def onboarding(self) -> tuple[Method, int]:
        """How clients that never trained join: a method to run with them, and for how many rounds. Default: none."""
        return self, 0


V = TypeVar("V")


def returned(value: Any, kind: type[V], method: Method, function: str) -> V:
    """What a method's function returned, if it is what the contract says."""
    if not isinstance(value, kind):
        raise UserError(
            f"{type(method).__name__}.{function} returned {type(value).__name__}; it has to return a {kind.__name__}."
        )
    return value


def pack(name: str, weights: Weights) -> dict[str, Tensor]:
    """Named tensors under one more name, to travel in a message's `extra`."""
    return {f"{name}:{n}": t for n, t in weights.items()}


def unpack(extra: dict[str, Tensor], name: str) -> Weights:
    """What was packed under the name."""
    return {n.removeprefix(f"{name}:"): t for n, t in extra.items() if n.startswith(f"{name}:")}
