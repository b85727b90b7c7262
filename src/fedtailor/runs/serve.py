"""A run whose clients are elsewhere: the same folder, events, checkpoints and report as a run on this machine."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..card import Card
from ..config import Config
from ..config import load as load_config
from ..data import partition as partitions
from ..data.dataset import Dataset
from ..data.public import given_images
from ..data.sources import load as load_data
from ..engine.crowd import Crowd, Post, Waiting
from ..engine.remote import RemoteFederation
from ..engine.roster import common_classes, roster, without_misfits
from ..errors import UserError
from ..fleet import fleet as fleets
from ..method import Job
from ..values import write_bytes
from .execute import Watcher, cadence, drive, make_job
from .facts import common_facts, read_facts, write_facts
from .folder import require_free


def serve(
    config: Config,
    out: Path,
    post: Post,
    names: Sequence[str] = (),
    start_with: int = 0,
    waiting: Waiting = Waiting(),  # noqa: B008
    watch: Watcher | None = None,
    command: str = "",
) -> Path:
    """Runs a config with the clients that a post reaches; goes on where the folder holds a run that is not finished.

    `names` are the clients that have keys; without them, the first ones that come take part. The run begins when all
    of them, or `start_with`, are there.
    """
    watch = watch or Watcher()
    old = read_facts(out) if (out / "run.json").exists() else None
    if old and not old.get("served"):
        raise UserError(f"{out} is a run of this machine. Continue it with 'fedtailor resume {out}'.")
    if old and old["status"] == "done":
        watch.say(f"{out} is finished already: nothing to serve.")
        return out
    if old:
        config = load_config(out / "config.toml")
    else:
        require_free(out)
    method = config.make_method()
    public = public_set(config)
    if old and public is not None and old.get("public_hash") != _digest(public):
        raise UserError(f"public.name = '{config.public.name}' is not the set that the run began with.")
    if method.card == Card():
        raise UserError(f"method.name = '{config.method['name']}': it has no card that says what leaves a client.")
    run = old["served"] if old else run_name(config.method["name"])
    crowd = Crowd(post, run, config.to_toml(), watch.say, watch.clients, method.declared.up)
    crowd.public = public
    if old:
        crowd.expected = tuple(old["client_names"])
        crowd.classes, crowd.shape = tuple(old["classes"]), tuple(old["input"])
        crowd.shut = frozenset(crowd.expected).difference(names or crowd.expected)  # since the run began
        able = [name for name in crowd.expected if name not in crowd.shut]
        if not able:
            raise UserError(f"{out}: none of its clients has a key any more ({', '.join(crowd.expected[:5])}, ...).")
        crowd.gather(min(start_with or len(able), len(able)), able)

    def made(samples: Sequence[int]) -> Job:
        job, _ = make_job(config, crowd.expected, samples, crowd.shape, len(classes))  # type: ignore[arg-type]
        return replace(job, public=0 if public is None else len(public))

    plan = (names, config.clients, config.make_partition().new_clients, start_with)
    count = 0 if old else roster(crowd, *plan)  # a run that has begun goes on without those that are left out
    classes = crowd.classes or common_classes(crowd)
    while (job := without_misfits(crowd, old["samples"] if old else [0] * len(crowd.expected), made)) is None:
        if len(crowd.members) < count:
            roster(crowd, *plan)
        classes = crowd.classes or common_classes(crowd)
    crowd.classes = classes
    samples = [seat.samples for seat in job.seats]
    fleet = fleets.make(config.make_fleet(), len(samples), config.seed)
    method.check(job)
    device = torch.device("cpu")  # merging is light, and clients bring their own
    if not old:
        write_bytes(out / "config.toml", config.to_toml().encode())
        facts = common_facts(method, job, classes, device, command)
        new = config.make_partition().new_clients
        facts |= {} if public is None else {"public_hash": _digest(public)}
        write_facts(out, {**facts, "served": run, "samples": samples, "new_clients": new})
    keep = 2 * cadence(config)[1] + 1  # versions of memories back to the older of two checkpoints
    rules = config.make_fleet()
    federation = RemoteFederation(job, method, fleet, rules, crowd, classes, waiting, keep, made)
    federation.precision = config.precision
    return drive(federation, config, job, out, device, watch)


def public_set(config: Config) -> Tensor | None:
    """The images that a served run gives its clients along: a set of the server's, or what the run's partition leaves
    of its data set, where the clients have their shares of it."""
    folder = Path(config.data.dir) if config.data.dir else None

    def dealt() -> tuple[Dataset, partitions.Partition]:
        data = load_data(config.data.name, folder, config.data.reading)
        return data, partitions.make(data, config.make_partition(), config.clients, config.seed)

    images = given_images(config.public, folder, config.data.reading, config.seed, dealt)
    return None if images is None else torch.from_numpy(np.ascontiguousarray(images))


def _digest(public: Tensor) -> str:
    return hashlib.sha256(public.numpy().tobytes()).hexdigest()


def run_name(method: str) -> str:
    """What clients call the run's folder: the method, or the file it is in, and something that is never the same."""
    stem = Path(method.partition(":")[0]).stem
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', stem)[:40]}-{secrets.token_hex(6)}"
