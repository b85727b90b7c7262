"""Clients in this process behind the same messages as real ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from fedtailor.engine.parcel import Parcel
from fedtailor.engine.site import Site

Twist = Callable[[str, Parcel, Parcel], Parcel | str | None]  # name, request, response


def quiet(text: str) -> None: ...


class MemoryPost:
    """Delivers every parcel at once. `twist` may change a response, fail it (a text) or hold it back (None)."""

    def __init__(self, folder: Path, names: Sequence[str], twist: Twist | None = None, data: str = "") -> None:
        self.sites = {i + 1: Site(name, folder / name, data, say=quiet) for i, name in enumerate(names)}
        self.twist = twist
        self.away: set[str] = set()
        self.sent: list[tuple[str, Parcel, Parcel]] = []
        self._replies: dict[str, Parcel | str] = {}

    def nodes(self) -> Mapping[int, str]:
        return {node: site.name for node, site in self.sites.items() if site.name not in self.away}

    def send(self, parcels: Mapping[int, Parcel]) -> Mapping[int, str]:
        ids = {}
        for node, parcel in parcels.items():
            site, number = self.sites[node], f"m{len(self.sent)}"
            answer: Parcel | str | None = site.answer(parcel)
            assert isinstance(answer, Parcel)
            self.sent.append((site.name, parcel, answer))
            if self.twist:
                answer = self.twist(site.name, parcel, answer)
            if answer is not None:
                self._replies[number] = answer
            ids[node] = number
        return ids

    def receive(self, ids: Collection[str]) -> Sequence[tuple[str, Parcel | str]]:
        return [(i, self._replies.pop(i)) for i in list(ids) if i in self._replies]
