"""What makes a result trustworthy: the test split decides nothing, and nothing but the config decides the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtailor.config import Local
from fedtailor.data.partition import TEST
from fedtailor.engine.loop import participants_of
from fedtailor.fleet import FleetConfig
from fedtailor.methods.fedavg import FedAvg
from fedtailor.registry import names
from fedtailor.runs import execute
from fedtailor.seeds import seed_of
from tools import by_hand, rows, small_config


@pytest.mark.parametrize("method", names("method"))
def test_poisoned_test_images_change_no_training_search_or_selection(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(method, rounds=2)
    clean = execute.start(config, tmp_path / "clean", "cpu", workers=1)
    original = execute.stores

    def poisoned(dataset, partition, device):
        images, labels = dataset.images.copy(), dataset.labels.copy()
        where = partition.split == TEST
        images[where] = 255 - images[where]
        labels[where] = (labels[where] + 1) % len(dataset.classes)
        return original(replace(dataset, images=images, labels=labels), partition, device)

    monkeypatch.setattr(execute, "stores", poisoned)
    poison = execute.start(config, tmp_path / "poison", "cpu", workers=1)
    kept = [[r for r in rows(f) if ",test," not in r] for f in (clean, poison)]
    assert kept[0] == kept[1]
    for file in sorted((clean / "nets").iterdir()):
        assert file.read_bytes() == (poison / "nets" / file.name).read_bytes()
    tested = [[r for r in rows(f) if ",test," in r] for f in (clean, poison)]
    assert tested[0] != tested[1]  # the poison was really there


def test_client_holds_no_test_image() -> None:
    setup = execute.prepare(small_config("fedavg"))
    federation, _ = setup.federation(execute.choose_device("cpu"), 1)
    learned = federation.store.split(0, 0).images.numpy().reshape(-1, 64)
    taken = setup.partition.owner >= 0
    tested = setup.dataset.images[taken & (setup.partition.split == TEST)].reshape(-1, 64)
    assert len(learned) + len(tested) == taken.sum()
    seen = {row.tobytes() for row in learned}
    duplicates = sum(row.tobytes() in seen for row in tested)
    assert duplicates < len(tested) / 50  # digits holds a few identical images of its own


def test_hash_seed_and_workers_change_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path\nfrom tools import small_config\nfrom fedtailor.runs.execute import start\n"
        "start(small_config('perfedrlnas'), Path(sys.argv[1]), 'cpu', int(sys.argv[2]))\n"
    )
    logs = []
    for hash_seed, workers, threads in (("0", "1", "1"), ("4242", "3", "2")):
        out = tmp_path / hash_seed
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, str(out), workers, str(Path(__file__).parent)]
        subprocess.run(command, env=environment, check=True)
        logs.append(rows(out))
    assert logs[0] == logs[1]


def test_keys_that_read_alike_are_different_keys() -> None:
    keys: list[tuple[int | str, ...]] = [
        (1, 23),
        (12, 3),
        ("1", 23),
        (1, "23"),
        (123,),
        ("123",),
        ("a", "bc"),
        ("ab", "c"),
    ]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert all(0 <= seed_of(i) < 2**63 for i in range(100))


def test_all_methods_see_the_same_participants(tmp_path: Path) -> None:
    def who(folder: Path) -> set[tuple[str, str]]:
        return {tuple(r.split(",")[:2]) for r in rows(folder) if r.split(",")[3] == "bytes_up"}  # type: ignore[misc]

    a = execute.start(small_config("fedavg"), tmp_path / "a", "cpu", 1)
    b = execute.start(small_config("perfedrlnas"), tmp_path / "b", "cpu", 1)
    assert who(a) == who(b)
    assert len(who(a)) == 6


def test_each_round_draws_its_participants_anew_among_the_clients_that_train() -> None:
    pixel = [[(1, 0)]] * 6
    job = replace(by_hand(FedAvg(), pixel, Local(), participants=2).job, clients=4)  # two are held out
    drawn = [participants_of(job, number) for number in range(1, 21)]
    assert drawn == [participants_of(job, number) for number in range(1, 21)]
    assert all(len(set(who)) == 2 for who in drawn)
    assert set().union(*drawn) == {0, 1, 2, 3}
    assert len(set(map(tuple, drawn))) > 3
    all_asked = by_hand(FedAvg(), pixel, Local(), fleet=FleetConfig(availability=0.5))
    assert len({tuple(all_asked.present(number)) for number in range(1, 21)}) > 3  # so is who can be reached


def test_partition_counts_are_disjoint_and_cover() -> None:
    setup = execute.prepare(small_config("fedavg"))
    places = [setup.partition.indices(c, s) for c in range(4) for s in range(3)]
    joined = np.concatenate(places)
    assert len(joined) == len(set(joined.tolist()))
