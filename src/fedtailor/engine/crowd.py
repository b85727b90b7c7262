"""Clients elsewhere, as their server sees them: by name, and what each is doing. A `Post` carries the messages."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .. import __version__
from ..card import Message
from ..errors import UNSHOWN, shown
from .parcel import Parcel, Refused
from .site import PROBLEMS
from .wire import SAMPLES_LIMIT, Request, Response, Work, Worked, read_response

POLL = 0.1  # seconds between looks for replies
LOOK = 1.0  # seconds between looks for clients that came or went
AGAIN = 30.0  # seconds until a client that could not take part is asked again who it is
NAMED = 10  # clients, at most, that a line lists
LAYOUT = 2 << 20  # bytes of an answer's layout beside three times its request's, which may hold twice the tensors
CLASSES_LIMIT = 10_000  # of a client: all networks of the run get an output for each class


class Post(Protocol):
    """Carries parcels to nodes and back."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are connected, each with the name its key is registered for, '' where there are no keys."""
        ...

    def send(self, parcels: Mapping[int, Parcel]) -> Mapping[int, str]:
        """Sends each node its parcel; returns the ids under which their replies will come."""
        ...

    def receive(self, ids: Collection[str]) -> Sequence[tuple[str, Parcel | Refused | str]]:
        """Replies that have come, by id; a text says why there will be none, a refusal why it was not fetched."""
        ...


@dataclass(frozen=True)
class Waiting:
    """How long a server waits."""

    deadline: float = 0.0  # seconds for a round; 0: until everybody who was asked has answered or is gone
    quorum: int = 1  # replies without which a round does not end


@dataclass(frozen=True)
class Late:
    """A reply that came after its round had ended."""

    name: str
    work: Work
    worked: Worked


@dataclass
class Member:
    """A client that is known by name."""

    node: int
    about: dict[str, Any]  # samples, shape, classes


@dataclass
class Pending:
    """A message that is not answered yet."""

    node: int
    name: str  # '' for a node that has yet to say its name
    request: Request
    layout: int = 0  # bytes that its answer's layout may have
    late: bool = False


class Crowd:
    """The clients of a run as its server sees them: by name, wherever they are."""

    def __init__(
        self,
        post: Post,
        run: str,
        config: str,
        say: Callable[[str], None] = print,
        show: Callable[[dict[str, str]], None] = lambda _: None,
        declared: Message | None = None,
    ) -> None:
        self.post, self.run, self.config, self.show = post, run, config, show
        self.say: Callable[[str], None] = lambda text: say(shown(text))  # what clients send may be quoted in it
        self.declared = declared  # what the run's method says that clients send
        self.members: dict[str, Member] = {}
        self.expected: tuple[str, ...] = ()  # all names of the run, once they are known
        self.shut: frozenset[str] = frozenset()  # those of them that have no key any more
        self.known: tuple[str, ...] = ()  # names of clients that have had their turn
        self.classes: tuple[str, ...] = ()  # of the run, and
        self.shape: tuple[int, ...] = ()  # the shape of its images, once they are known
        self.public: Tensor | None = None  # the images of its public set, which newcomers are given
        self.late: dict[str, int] = {}  # rounds of which a memory was written after the deadline
        self.stale: list[Late] = []  # replies that came after the deadline
        self._pending: dict[str, Pending] = {}
        self._nodes: Mapping[int, str] = {}
        self._asked: dict[int, float] = {}  # nodes that were asked who they are, and when
        self._looked = 0.0
        self._shown: dict[str, str] = {}

    # who is there -----------------------------------------------------------------------------------------------

    def ready(self, name: str) -> bool:
        """Whether a client is there and has nothing else to do."""
        member = self.members.get(name)
        return member is not None and member.node in self._nodes and not self._busy(member.node)

    def states(self) -> dict[str, str]:
        names = self.expected or tuple(sorted(self.members))
        return {name: self._state(name) for name in names}

    def _state(self, name: str) -> str:
        member = self.members.get(name)
        if member is None:
            return "not here yet"
        if member.node not in self._nodes:
            return "lost"
        found = [p for p in self._pending.values() if p.node == member.node]
        return "ready" if not found else "late" if found[0].late else "working"

    def look(self, now: bool = False) -> None:
        """Notices who came and who went; newcomers are asked who they are."""
        if not now and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        before, self._nodes = self._nodes, dict(self.post.nodes())
        for name, member in self.members.items():
            if member.node in before and member.node not in self._nodes:
                self.say(f"{name} is lost; it is asked again when it is back")
            if member.node in self._nodes and member.node not in before and before:
                self.say(f"{name} is back")
        known = {member.node for member in self.members.values()}
        fresh = [
            node
            for node in self._nodes
            if node not in known
            and not self._busy(node)
            and (node not in before or time.monotonic() - self._asked.get(node, -AGAIN) >= AGAIN)
        ]
        for node in fresh:
            self._asked[node] = time.monotonic()
        about = (self.config, self.classes)
        self._send({node: Request(self.run, new_number(), *about, public=self.public) for node in fresh}, "")

    def gather(self, count: int, names: Collection[str] = (), seconds: float = 0) -> bool:
        """Waits until so many clients (of these names, where they are given) are there: for ever, or so many seconds.
        Returns whether they are."""
        told, began = -1, time.monotonic()
        while True:
            self.look()
            self.collect()
            here = [n for n in self.members if self.ready(n) and (not names or n in names)]
            if len(here) >= count:
                return True
            if seconds and time.monotonic() - began > seconds:
                return False
            if len(here) != told:
                told = len(here)
                away = [n for n in names or self.expected if not self.ready(n)]
                missing = f"; not yet: {', '.join(away[:NAMED])}" + (", ..." if len(away) > NAMED else "")
                self.say(f"{told} of {count} clients are here" + (missing if away else ""))
            time.sleep(POLL)

    def await_all(self, seconds: float) -> None:
        """Waits for clients that have been here and are late or lost, but not for ever."""
        ends = time.monotonic() + seconds
        while not all(self.ready(name) for name in self.members) and time.monotonic() < ends:
            self.look()
            self.collect()
            time.sleep(POLL)

    def _busy(self, node: int) -> bool:
        return any(p.node == node for p in self._pending.values())

    # messages ---------------------------------------------------------------------------------------------------

    def ask(self, requests: Mapping[str, Request], waiting: Waiting) -> tuple[dict[str, Response], dict[str, str]]:
        """Sends requests by name and waits for the responses; returns them, and why the others are missing.

        Ends when all have answered, or at the deadline with a quorum of responses of those who were to work.
        """
        self._send({self.members[name].node: request for name, request in requests.items()})
        open_, began = set(requests), time.monotonic()
        found: dict[str, Response] = {}
        missing: dict[str, str] = {}
        while open_:
            self.look()
            for name, response in self.collect():
                if name in open_:
                    open_.discard(name)
                    if isinstance(response, Response):
                        found[name] = response
                    else:
                        missing[name] = response
            working = [n for n, r in found.items() if r.worked]
            wanted = min(waiting.quorum, sum(r.work is not None for r in requests.values()))
            if waiting.deadline and time.monotonic() - began > waiting.deadline and len(working) >= wanted:
                for pending in self._pending.values():
                    pending.late |= pending.name in open_
                self.say(f"late: {', '.join(sorted(open_))}")
                self._show()
                return found, missing | dict.fromkeys(open_, "late")
            if open_:
                time.sleep(POLL)
        return found, missing

    def collect(self) -> list[tuple[str, Response | str]]:
        """What has come in for requests in time; hellos and late replies are dealt with here."""
        found: list[tuple[str, Response | str]] = []
        for number, content in self.post.receive(list(self._pending)) if self._pending else ():
            pending = self._pending.pop(number)
            response = self._read(pending, content)
            if pending.request.seat is None:
                if isinstance(response, Response):
                    self._enrol(pending.node, response)
            elif pending.late:
                if isinstance(response, Response) and response.worked and pending.request.work:
                    if response.worked.remembers:
                        self.late[pending.name] = pending.request.work.round
                    self.stale.append(Late(pending.name, pending.request.work, response.worked))
                    self.say(f"{pending.name} answered round {pending.request.work.round} too late")
            else:
                found.append((pending.name, response))
        self._show()
        return found

    def _show(self) -> None:
        states = self.states()
        if states != self._shown:
            self._shown = states
            self.show(states)

    def _send(self, requests: Mapping[int, Request], unknown: str | None = None) -> None:
        if not requests:
            return
        names = {member.node: name for name, member in self.members.items()}
        parcels = {node: request.pack() for node, request in requests.items()}
        for node, number in self.post.send(parcels).items():
            name = names[node] if unknown is None else unknown
            self._pending[number] = Pending(node, name, requests[node], LAYOUT + 3 * len(parcels[node].layout))
        self._show()

    def _read(self, pending: Pending, content: Parcel | Refused | str) -> Response | str:
        who = pending.name or self._nodes.get(pending.node, "") or f"node {pending.node}"
        if isinstance(content, str):
            self.say(f"{who} gave no answer: {content}")
            return "lost"
        try:
            if isinstance(content, Refused):
                raise content
            if len(content.layout) > pending.layout:  # before it is read: as values JSON is many times as large
                raise Refused(f"its layout has {len(content.layout)} bytes, more than the {pending.layout} expected")
            name = pending.name or _claimed(content)
            response = read_response(content, pending.request, name, self.declared)
        except Refused as error:
            self.say(f"a message of {who} is refused: {error}")
            return "refused"
        if response.problem:
            self.say(f"{who} has a problem: {PROBLEMS.get(response.problem, 'it does not say which')}")
            return response.problem if response.problem in PROBLEMS else "problem"
        return response

    def _enrol(self, node: int, response: Response) -> None:
        """Takes a client in under its name, or says why not."""
        name, about, registered = response.client, response.about, self._nodes.get(node)
        if registered is None:
            return  # it left while it was saying its name
        why = ""
        if registered and registered != name:
            why = f"its key is registered for '{registered}'"
        elif name in self.members and self.members[name].node in self._nodes and self.members[name].node != node:
            why = "a client of this name is here already"
        elif name in self.known:
            why = "it was in the run and has its network"
        elif self.expected and name not in self.expected:
            why = "the run has no client of this name"
        elif about.get("fedtailor") != __version__:
            why = f"it runs fedtailor {about.get('fedtailor')}, this is {__version__}"
        else:
            why = _unsound(about) or self._misfit(about)
        if why:
            self.say(f"'{name}' is not taken in: {why}")
            return
        self.members[name] = Member(node, about)
        self.say(f"{name} is here with {about['samples']} training images")
        others = [n for n, member in self.members.items() if member.about["shape"] != about["shape"]]
        if others:
            self.say(
                f"{name}'s images are {about['shape']} (channels, height, width), not as those of "
                f"{', '.join(others[:NAMED])}: the run will be for those that most clients have"
            )

    def _misfit(self, about: dict[str, Any]) -> str:
        """Why its images are not those of the run, once that has any."""
        if not self.shape or list(self.shape) == about["shape"]:
            return ""
        return f"its images are {about['shape']} (channels, height, width), those of the run {list(self.shape)}"

    def settle(self) -> None:
        """Gives the run the images that most of its clients have; of equals, those who were here first. The others
        are left out."""
        shapes = Counter(tuple(member.about["shape"]) for member in self.members.values())
        self.shape = shapes.most_common(1)[0][0]
        for name, member in list(self.members.items()):
            if why := self._misfit(member.about):
                self.leave_out(name, why)

    def leave_out(self, name: str, why: str) -> None:
        """Takes a client out again. It is asked again who it is in a while: its owner may have helped it."""
        self.members.pop(name, None)
        self.say(f"'{name}' is not taken in: {why}")


def _unsound(about: dict[str, Any]) -> str:
    samples, shape, classes = (about.get(k) for k in ("samples", "shape", "classes"))
    if type(samples) is not int or not 1 <= samples <= SAMPLES_LIMIT:
        return f"{str(samples)[:40]} is no believable number of training images"
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and 1 <= n <= 10_000 for n in shape):
        return "it does not say what shape its images have"
    if not isinstance(classes, list) or not classes:
        return "it does not say what classes its images have"
    if len(classes) > CLASSES_LIMIT:
        return f"it has {len(classes)} classes; a federation has at most {CLASSES_LIMIT}"
    if not all(isinstance(c, str) and 0 < len(c) <= 500 and not UNSHOWN.search(c) for c in classes):
        return "its classes have names that cannot be shown"
    if len(set(classes)) != len(classes):
        return "two of its classes have one name"
    return ""


def _claimed(content: Parcel) -> str:
    """The name that a newcomer gives itself."""

    try:
        name = json.loads(content.layout)["tree"]["client"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("it is no message of this package") from error
    if not isinstance(name, str) or not name or len(name) > 80 or not name.isprintable():
        raise Refused("it gives itself no proper name")
    return name


def new_number() -> str:
    """Names a request; never the same twice."""
    return secrets.token_hex(8)
