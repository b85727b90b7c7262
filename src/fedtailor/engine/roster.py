"""Who takes part in a run, and with which classes, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import UserError
from ..method import Job
from .crowd import Crowd


def roster(crowd: Crowd, names: Sequence[str], clients: int, new_clients: int, start_with: int) -> int:
    """Waits for those who take part, and puts them in the order of their places: the names that have keys, or whoever
    comes first. Who has other images than most does not. Returns how many had to be there."""
    total = clients + new_clients
    if names:
        if len(names) != total:
            raise UserError(
                f"there are keys of {len(names)} nodes, but clients = {clients}"
                + (f" and partition.new_clients = {new_clients}" if new_clients else "")
                + ". Make them equal."
            )
        if start_with > total:
            raise UserError(f"--start-with {start_with}: there are only {total} clients.")
    count = start_with or total if names else total
    crowd.expected = tuple(names)
    crowd.gather(count)
    if not crowd.shape:
        crowd.settle()
        crowd.gather(count)
    crowd.expected = tuple(names) or tuple(sorted(crowd.members)[:total])
    return count


def common_classes(crowd: Crowd) -> tuple[str, ...]:
    """The classes of the federation: the same list everywhere, or all names that anybody has, sorted."""
    lists = {tuple(m.about["classes"]) for m in crowd.members.values()}
    return lists.pop() if len(lists) == 1 else tuple(sorted({c for found in lists for c in found}))


def without_misfits(crowd: Crowd, known: Sequence[int], made: Callable[[Sequence[int]], Job]) -> Job | None:
    """The job that is made with the numbers of images of those who are here, and the known ones of all others.

    None: some have so many that no network fits what their devices can do. These were left out, and told.
    """

    def job_with(names: Sequence[str]) -> Job:
        there = {name: crowd.members[name].about["samples"] for name in names}
        return made([there.get(name, before) for name, before in zip(crowd.expected, known, strict=True)])

    here = [name for name in crowd.expected if name in crowd.members]
    try:
        return job_with(here)
    except UserError:
        why: dict[str, str] = {}
        for name in here:
            try:
                job_with([name])
            except UserError as error:
                why[name] = str(error)
        if len(why) in (0, len(here)):  # it is not for the clients to mend
            raise
        for name, error in why.items():
            crowd.leave_out(name, error)
        return None
