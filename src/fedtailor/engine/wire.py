"""What travels between a server and its clients: requests, responses, and what a server does not believe of them.

Nothing that comes in is used before it is checked: `Refused` says what is wrong. This module knows no transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..card import Message
from ..fleet.budget import Budget
from ..fleet.profile import Profile
from ..method import Fact, Reply, Seat, Task
from ..spaces.base import Space
from ..values import Value, bytes_of
from .parcel import Parcel, Refused, pack, unpack

SMALL = 1 << 20  # bytes a client may send beside the tensors it was given
SAMPLES_LIMIT = 10**8  # a client that claims more training images is not believed
FACTS_LIMIT = 100
TEXT_LIMIT = 1 << 16
KEPT = ("parameters", "flops", "arch")  # what a client says of its network
WORD = re.compile(r"[\w.+-]*", re.ASCII)  # an arch in a cell of a table

# what a server asks for ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The client's half of a round."""

    round: int
    task: Task
    memory: int  # the round after which the memory to begin with was written; 0: none
    joining: bool = False  # a client that never trained joins, as the method says


@dataclass(frozen=True)
class Evaluate:
    """The personal network as of a round, made, scored and, when it is the last time, kept at the client."""

    round: int
    offer: Task
    memory: int
    shared: Task | None = None  # the server's model, to be scored too
    last: bool = False
    tune: int = 0  # epochs of fine-tuning, as many of them as val likes best


@dataclass(frozen=True)
class Request:
    """Everything the server wants of a client at once. Without a seat it only asks who is there."""

    run: str  # names the run's folder at the client
    number: str  # never used twice
    config: str  # TOML
    classes: tuple[str, ...] = ()
    seat: Seat | None = None
    keep: int = 1  # how many versions of its memory the server may still come back to
    evaluate: Evaluate | None = None
    work: Work | None = None
    public: Tensor | None = None  # the images of the run's public set, uint8 [N, H, W, C], for a client to keep

    def pack(self) -> Parcel:
        return pack(
            {
                "run": self.run,
                "number": self.number,
                "config": self.config,
                "classes": list(self.classes),
                "seat": self.seat and _seat_value(self.seat),
                "keep": self.keep,
                "evaluate": self.evaluate
                and {
                    "round": self.evaluate.round,
                    "offer": task_value(self.evaluate.offer),
                    "memory": self.evaluate.memory,
                    "shared": self.evaluate.shared and task_value(self.evaluate.shared),
                    "last": self.evaluate.last,
                    "tune": self.evaluate.tune,
                },
                "work": self.work
                and {
                    "round": self.work.round,
                    "task": task_value(self.work.task),
                    "memory": self.work.memory,
                    "joining": self.work.joining,
                },
                "public": self.public,
            }
        )


def read_request(value: Value, space_of: Callable[[str, tuple[int, int, int], int], Space]) -> Request:
    """A request as a client reads it; `space_of(config, shape, classes)` makes the space of its seat."""
    try:
        evaluate, work, seat = value["evaluate"], value["work"], value["seat"]
        return Request(
            str(value["run"]),
            str(value["number"]),
            str(value["config"]),
            tuple(value["classes"]),
            _seat_of(seat, space_of(value["config"], tuple(seat["input"]), len(value["classes"]))) if seat else None,
            int(value["keep"]),
            evaluate
            and Evaluate(
                int(evaluate["round"]),
                task_of(evaluate["offer"]),
                int(evaluate["memory"]),
                evaluate["shared"] and task_of(evaluate["shared"]),
                bool(evaluate["last"]),
                int(evaluate["tune"]),
            ),
            work and Work(int(work["round"]), task_of(work["task"]), int(work["memory"]), bool(work["joining"])),
            value["public"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"it is no request of this package ({type(error).__name__}: {error})") from error


def _seat_value(seat: Seat) -> Value:
    return {
        **{name: getattr(seat, name) for name in ("id", "name", "samples", "hard", "batch", "images")},
        "profile": asdict(seat.profile),
        "budget": seat.budget.limits,
        "arch": seat.arch,
        "input": list(seat.space.input),
    }


def _seat_of(value: Value, space: Space) -> Seat:
    profile, budget = Profile(**value["profile"]), Budget(**value["budget"])
    return Seat(
        int(value["id"]),
        str(value["name"]),
        int(value["samples"]),
        profile,
        budget,
        bool(value["hard"]),
        space,
        int(value["batch"]),
        int(value["images"]),
        tuple(value["arch"]),
    )


def task_value(task: Task | Reply) -> Value:
    return {"weights": _listed(task.weights), "arch": task.arch, "extra": _listed(task.extra), "facts": task.facts}


def task_of(value: Value) -> Task:
    return Task(_named(value["weights"]), value["arch"], _named(value["extra"]), value["facts"])


def _listed(tensors: dict[str, Tensor]) -> Value:
    return {"names": list(tensors), "tensors": list(tensors.values())}  # names of tensors may hold what keys may not


def _named(value: Value) -> dict[str, Tensor]:
    return dict(zip(value["names"], value["tensors"], strict=True))


# what a client answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worked:
    reply: Reply
    flops: int
    remembers: bool  # whether there is a memory of this round at the client


@dataclass(frozen=True)
class Evaluated:
    personal: dict[str, float]  # accuracies by split
    shared: dict[str, float]
    facts: dict[str, Fact]  # what the network is, where the server knows its arch anyway


@dataclass(frozen=True)
class Response:
    """Everything a client sends at once."""

    run: str
    number: str  # of the request
    client: str
    about: dict[str, Value] = field(default_factory=dict)  # who is there: samples, shape, classes, versions
    evaluated: Evaluated | None = None
    worked: Worked | None = None
    problem: str = ""  # why there is no more: a sentence without anything of the client's own

    def pack(self) -> Parcel:
        return pack(
            {
                "run": self.run,
                "number": self.number,
                "client": self.client,
                "about": self.about,
                "evaluated": self.evaluated and asdict(self.evaluated),
                "worked": self.worked
                and {
                    "reply": task_value(self.worked.reply),
                    "flops": self.worked.flops,
                    "remembers": self.worked.remembers,
                },
                "problem": self.problem,
            }
        )


def read_response(parcel: Parcel, request: Request, client: str, declared: Message | None = None) -> Response:
    """A response as the server reads it: to this very request, by this client, of sound shape, every number finite.

    `declared` is what the run's method says that clients send.
    """
    task = request.work.task if request.work else None
    limit = (2 * bytes_of([task.weights, task.extra]) if task else 0) + SMALL
    if len(parcel.data) > limit:
        raise Refused(f"it has {len(parcel.data)} bytes, more than the {limit} that were to be expected")
    value = unpack(parcel)
    try:
        if (value["run"], value["number"]) != (request.run, request.number):
            raise Refused("it answers another request than the one that was sent: replayed, or of another run")
        if value["client"] != client:
            raise Refused(f"it says it comes from '{str(value['client'])[:80]}'")
        worked, evaluated = value["worked"], value["evaluated"]
        if worked and task is None:
            raise Refused("it holds work that nobody asked for")
        if evaluated and request.evaluate is None:
            raise Refused("it holds scores that nobody asked for")
        return Response(
            request.run,
            request.number,
            client,
            _facts(value["about"], lists=True) if request.seat is None else {},
            evaluated and _evaluated(evaluated, request.evaluate),  # type: ignore[arg-type]
            worked and _worked(worked, task, request.seat, declared),  # type: ignore[arg-type]
            str(value["problem"])[:500],
        )
    except Refused:
        raise
    except Exception as error:  # a hostile message may make a check fail in any way
        raise Refused(f"it is no response of this package ({type(error).__name__}: {str(error)[:200]})") from error


def _evaluated(value: Value, asked: Evaluate) -> Evaluated:
    splits = ("val", "test") if asked.last else ("val",)
    if value["shared"] and asked.shared is None:
        raise Refused("it scores a model that nobody sent")
    for scores in (value["personal"], value["shared"]):
        for split, accuracy in scores.items():
            if split not in splits or type(accuracy) is not float or not 0 <= accuracy <= 1:
                raise Refused(f"'{str(split)[:40]}' = {str(accuracy)[:40]} is no accuracy")
    facts = _facts(value["facts"])
    for name, fact in facts.items():  # they become cells of the run's table
        sound = isinstance(fact, str) and WORD.fullmatch(fact) if name == "arch" else _is_count(fact)
        if name not in KEPT or not sound:
            raise Refused(f"'{name[:40]}' = {str(fact)[:40]!r} is nothing that a network is")
    return Evaluated(dict(value["personal"]), dict(value["shared"]), facts)


def _is_count(count: Fact) -> bool:
    """Whether it is a number of operations or parameters."""
    return type(count) is int and 0 <= count < 1 << 62


def _worked(value: Value, task: Task, seat: Seat, declared: Message | None) -> Worked:
    said = value["reply"]
    reply = Reply(_named(said["weights"]), said["arch"], _named(said["extra"]), _facts(said["facts"]))
    check_reply(reply, task, seat.space)
    if declared is not None:
        check_declared(reply, declared)
    flops = value["flops"]
    if not _is_count(flops):
        raise Refused(f"{str(flops)[:40]} is no number of operations")
    return Worked(reply, flops, bool(value["remembers"]))


def check_reply(reply: Reply, task: Task, space: Space) -> None:
    """Raises unless a reply holds nothing but what its task allows: entries that were sent, and a little beside."""
    given = task.weights
    if not isinstance(reply.arch, tuple) or not _whole(reply.arch):
        raise Refused("its arch is no list of whole numbers")  # 1.0 and true equal 1, but choose no option
    if reply.arch not in ((), task.arch):
        if task.arch:
            raise Refused(f"it is for arch {str(reply.arch)[:200]}, the client was given {task.arch}")
        space.check(reply.arch)  # the client chose its own part of what it was given
        index = space.index(reply.arch)
        given = {n: t[index[n]] for n, t in given.items() if n in index}
    _check_tensors(reply.weights, given, "weights")
    beside = {n: t for n, t in reply.extra.items() if n not in task.extra}
    _check_tensors({n: t for n, t in reply.extra.items() if n in task.extra}, task.extra, "extra")
    room = SMALL + bytes_of([task.weights, task.extra])  # SCAFFOLD and pFedHN send changes of weights
    if bytes_of(beside) > room:
        raise Refused(f"it holds {bytes_of(beside)} bytes that the client was not given, more than {room}")
    for name, tensor in (reply.weights | reply.extra).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refused(f"'{name}' holds numbers that are infinite or none at all (NaN)")
    for name, tensor in reply.extra.items():
        whole = name in task.extra and not tensor.is_floating_point()
        if whole and not torch.equal(tensor, task.extra[name].cpu()):
            raise Refused(f"extra: '{name}' are whole numbers that nobody trains, and they came back as others")
    for name, fact in reply.facts.items():
        if name in task.facts and fact != task.facts[name]:
            raise Refused(f"the fact '{name}' was {task.facts[name]!r} and came back as {str(fact)[:40]}")
    accuracy = reply.facts.get("accuracy", 0.0)
    if not isinstance(accuracy, int | float) or not 0 <= accuracy <= 1:
        raise Refused(f"accuracy = {str(accuracy)[:40]} is no accuracy")


def _whole(arch: Any) -> bool:
    """Whether an arch, or a sub-network with several options in a place, is made of whole numbers alone."""
    return all(map(_whole, arch)) if isinstance(arch, tuple) else type(arch) is int


def check_declared(reply: Reply, declared: Message) -> None:
    """Raises where a reply holds what its method does not say that clients send."""
    more = declared.undeclared(reply.weights, reply.extra, reply.facts)
    if more:
        raise Refused(f"it holds what the method's card does not declare: {', '.join(more[:3])[:200]}")


def _check_tensors(found: dict[str, Tensor], given: dict[str, Tensor], what: str) -> None:
    for name, tensor in found.items():
        if name not in given:
            raise Refused(f"{what}: the client was not given '{str(name)[:80]}'")
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            was, now = (f"{t.dtype} {tuple(t.shape)}" for t in (given[name], tensor))
            raise Refused(f"{what}: '{name}' was {was} and came back as {now}")


def _facts(value: Value, lists: bool = False) -> dict[str, Any]:
    """Small facts: finite numbers and short texts, and, where a newcomer speaks of itself, lists of them."""
    if len(value) > FACTS_LIMIT:
        raise Refused(f"it states {len(value)} facts, more than {FACTS_LIMIT}")
    for name, fact in value.items():
        for item in fact if lists and isinstance(fact, list) else (fact,):
            if isinstance(item, str):
                if len(item) > TEXT_LIMIT:
                    raise Refused(f"the fact '{name[:40]}' is a text of {len(item)} letters")
            elif not isinstance(item, int | float) or not abs(item) <= 1e300:  # nor NaN
                raise Refused(f"the fact '{name[:40]}' = {str(item)[:40]} is no number")
    return dict(value)


def describe(response: Response) -> str:
    """In words, what a client is about to send."""
    parts = []
    if response.evaluated:
        parts.append("accuracy of its personal network" + (" and what it is" if response.evaluated.facts else ""))
        parts += ["accuracy of the server's model"] if response.evaluated.shared else []
    if response.worked:
        reply = response.worked.reply
        parts += [f"{len(reply.weights)} tensors of weights"] if reply.weights else []
        parts += ["the arch it was given or chose"] if reply.arch else []
        parts += [f"'{name}'" for name in reply.extra] + [str(name) for name in reply.facts]
    if response.about:
        parts += [str(name) for name in response.about]
    return ", ".join(parts) or response.problem
