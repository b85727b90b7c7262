"""Clients that were never there come to a run that was served: each joins in its method's way, where its data is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config import load as load_config
from ..engine import crowd as crowds
from ..engine.crowd import Crowd, Post, Waiting
from ..engine.remote import RemoteFederation
from ..errors import UserError
from ..evaluate import tuning
from ..fleet import fleet as fleets
from ..method import Job
from .execute import Watcher, open_space
from .facts import read_facts
from .join import job_of, last_state, with_room
from .serve import public_set, run_name


def welcome(
    folder: Path,
    post: Post,
    count: int,
    profile: str = "",
    watch: Watcher | None = None,
    deadline: float = 0,
) -> list[str]:
    """Takes in so many newcomers, one after another, and returns their names. The run's folder is only read.

    They start from its newest checkpoint: the last round, or, beside a run that goes on, the last that was saved. One
    that takes longer than the deadline for a round, or to come back, keeps the next one waiting no more.
    """
    watch = watch or Watcher()
    facts, config, space = read_facts(folder), load_config(folder / "config.toml"), open_space(folder)
    if not facts.get("served"):
        raise UserError(f"{folder} was not served. Its newcomers join with 'fedtailor onboard {folder}'.")
    method, rules = config.make_method(), config.make_fleet()
    sizes = list(zip(facts["client_names"], facts["samples"], strict=True))
    at, classes = len(sizes), tuple(facts["classes"])
    channels, height, width = space.input
    data = replace(config.data, colour="grey" if channels == 1 else "colour")
    data = replace(data, size=height) if height == width else data
    asked = replace(config, data=data).to_toml()
    crowd = Crowd(post, run_name(config.method["name"]), asked, watch.say, watch.clients, method.declared.up)
    crowd.known, crowd.classes, crowd.shape = tuple(facts["client_names"]), classes, space.input
    crowd.public = public_set(config)
    public = 0 if crowd.public is None else len(crowd.public)
    device = fleets.newcomer(rules, at, config.seed, profile)
    fleet = (*fleets.make(rules, at, config.seed), device)

    def take_in(name: str) -> None:
        def job_for(samples: Sequence[int]) -> Job:
            names = [n for n, _ in sizes] + [name]
            clients = list(zip(names, samples, strict=True))
            return job_of(config, method, space, clients, config.clients, fleet, public)

        job = job_for([n for _, n in sizes] + [crowd.members[name].about["samples"]])
        state = with_room(last_state(folder, job, torch.device("cpu"), watch.say), job, method, at)
        federation = RemoteFederation(job, method, fleet, rules, crowd, classes, Waiting(deadline), 2, job_for)
        rows = federation.take_in(state, [job.seats[at]], "personal", tuning(method))
        scores = ", ".join(f"{row.split} {float(row.value):.4f}" for row in rows if row.metric == "personal_accuracy")
        watch.say(f"{name} has its network: accuracy on {scores}" if scores else f"{name} has not finished")

    done: list[str] = []
    watch.say(f"{folder}: waiting for {count} newcomer{'s' * (count != 1)}")
    while len(done) < count:
        crowd.look()
        crowd.collect()
        for name in [n for n in crowd.members if n not in done and crowd.ready(n)][: count - len(done)]:
            try:
                take_in(name)
            except UserError as error:
                watch.say(f"{name} could not join: {error}")
            done.append(name)
        time.sleep(crowds.POLL)
    return done
