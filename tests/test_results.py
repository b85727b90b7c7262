"""Reading run folders and comparing them: numbers worked out by hand, damage, honesty."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedtailor.errors import UserError
from fedtailor.runs.compare import compare, identical
from fedtailor.runs.results import Results, spread
from synthetic_run import HEADER, config, evaluation, facts, realistic, write_run

# Round 1 is better than round 2 for everybody: whoever picks a best round is found out.
EVENTS = [
    (1, 0, "train", "loss", 2.0),
    (1, 1, "train", "loss", 4.0),
    (1, 0, "", "bytes_down", 100),
    (1, 0, "", "bytes_up", 10),
    (1, "", "", "round_seconds", 1800.0),
    (1, "", "", "measured_seconds", 0.25),
    *evaluation(1, "val", personal={0: 0.9, 1: 0.9, 2: 0.9}),
    (2, 2, "train", "loss", 1.0),
    (2, 2, "", "bytes_down", 200),
    (2, 2, "", "bytes_up", 20),
    (2, "", "", "round_seconds", 5400.0),
    (2, "", "", "measured_seconds", 0.5),
    *evaluation(2, "val", personal={0: 0.3, 1: 0.5, 2: 0.7}),
    *evaluation(2, "test", personal={0: 0.2, 1: 0.5, 2: 0.8}, **{"global": {0: 0.4, 1: 0.4, 2: 0.4}}),
    *((2, c, "", "personal_parameters", p) for c, p in ((0, 10), (1, 20), (2, 60))),
    (2, 0, "", "personal_arch", "1-0-2"),
    (2, 1, "", "personal_arch", "0"),
]


def edit(folder: Path, **changes: object) -> Path:
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**told, **changes}))
    return folder


def text_of(table: object) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", EVENTS)


# ---- numbers


def test_spread_by_hand() -> None:
    s = spread([0.2, 0.5, 0.8])
    assert s is not None
    assert s.mean == pytest.approx(0.5)
    assert s.std == pytest.approx((2 * 0.09 / 3) ** 0.5)  # over all clients: divided by n
    assert s.worst_decile == pytest.approx(0.2)  # a tenth of three is one client
    assert s.n == 3


@pytest.mark.parametrize(("n", "worst"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (100, 4.5)])
def test_worst_decile_is_a_tenth_rounded_up(n: int, worst: float) -> None:
    s = spread([float(v) for v in range(n)][::-1])
    assert s is not None
    assert s.worst_decile == worst


def test_clients_without_data_are_left_out_and_told(tmp_path: Path) -> None:
    events = evaluation(2, "test", personal={0: 0.4, 1: float("nan"), 2: 0.6})
    results = Results.read(write_run(tmp_path / "r", events))
    personal = results.spreads["personal"]
    assert personal is not None
    assert (personal.n, personal.mean) == (2, pytest.approx(0.5))
    assert "1 client(s) have no personal accuracy" in results.warnings()[0]


def test_summary(run: Path) -> None:
    found = Results.read(run).summary()
    assert found["personal"] == {
        "mean": pytest.approx(0.5),
        "std": pytest.approx(0.06**0.5),
        "worst_decile": pytest.approx(0.2),
        "n": 3,
    }
    assert found["global"]["mean"] == pytest.approx(0.4)
    assert found["new"] is None
    assert (found["split"], found["round"], found["rounds"], found["finished"]) == ("test", 2, 2, True)
    assert (found["bytes_down"], found["bytes_up"]) == (300, 30)
    assert found["personal_parameters"] == 30
    assert found["personal_flops"] is None
    assert found["simulated_hours"] == pytest.approx(2.0)
    assert found["measured_seconds"] == 12.5
    assert (found["method"], found["net"], found["data"], found["seed"]) == ("fedavg", "cnn", "digits", 0)
    assert found["partition_hash"] == "a" * 64


def test_costs_have_the_units_of_the_report(tmp_path: Path) -> None:
    sizes = {"personal_parameters": 11_173_962, "personal_flops": 3_200}
    rows = [(2, 0, "", name, value) for name, value in {**sizes, "bytes_down": 83_881_760_000}.items()]
    told = text_of(Results.read(write_run(tmp_path / "r", [*evaluation(2, "test", personal={0: 0.4}), *rows])).table())
    assert "83.9 GB down, 11.2 M parameters, 3.20 k FLOPs" in told


def test_the_last_round_counts_not_the_best(run: Path) -> None:
    results = Results.read(run)
    assert results.per_client("personal_accuracy", "val") == {0: 0.3, 1: 0.5, 2: 0.7}
    assert results.per_client("personal_accuracy", "val", 1) == {0: 0.9, 1: 0.9, 2: 0.9}
    assert "50.00 %" in text_of(results.table())
    assert "90.00" not in text_of(results.table())


def test_series_and_texts(run: Path) -> None:
    results = Results.read(run)
    loss = results.series("loss", "train")
    assert loss.rounds.tolist() == [1, 2]
    assert loss.mean.tolist() == [3.0, 1.0]
    assert loss.std.tolist() == [1.0, 0.0]
    assert loss.n.tolist() == [2, 1]
    assert len(results.series("nothing", "val").rounds) == 0
    assert results.per_client_text("personal_arch") == {0: "1-0-2", 1: "0"}  # a one-dimensional arch stays text


# ---- damage


def test_a_torn_last_line_is_ignored(run: Path) -> None:
    before = Results.read(run)
    with (run / "events.csv").open("a") as file:
        file.write("2,1,test,personal_accuracy,0.99")  # looks whole, but without its newline it may be half a number
    assert identical(before, run)


def test_a_round_written_twice_counts_once(run: Path) -> None:
    with (run / "events.csv").open("a") as file:
        file.write("2,2,,bytes_up,20\n")
    assert Results.read(run).total("bytes_up") == 30


def test_a_damaged_line_is_named(run: Path) -> None:
    with (run / "events.csv").open("a") as file:
        file.write("2,1,te2,1,test,loss,0.3\n")
    with pytest.raises(UserError, match=f"line {len(EVENTS) + 2}"):
        Results.read(run)


@pytest.mark.parametrize(
    "row",
    [
        "x,1,test,loss,1",
        "1,1,tset,loss,1",
        "1,1,test,loss,high",
        "1,who,test,loss,1",
        "1,3,test,loss,1",
        "1,9999999,test,loss,1",
    ],
)
def test_a_wrong_field_is_an_error(run: Path, row: str) -> None:
    (run / "events.csv").write_text(f"{HEADER}\n1,1,test,loss,0.1\n{row}\n")
    with pytest.raises(UserError, match="line 3"):
        Results.read(run)


def test_folders_that_are_no_runs(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        Results.read(tmp_path / "absent")
    with pytest.raises(UserError, match="It holds runs"):
        Results.read(tmp_path)
    (run / "events.csv").write_text("time,loss\n1,2\n")
    with pytest.raises(UserError, match="not an event table"):
        Results.read(run)
    (run / "events.csv").unlink()
    with pytest.raises(UserError, match=r"without events\.csv"):
        Results.read(run)


def test_foreign_and_torn_facts(run: Path) -> None:
    with pytest.raises(UserError, match="format 7"):
        Results.read(edit(run, format=7))
    (run / "run.json").write_text('{"format": 1, "sta')
    with pytest.raises(UserError, match="cannot be read"):
        Results.read(run)
    (run / "run.json").write_text("[]")
    with pytest.raises(UserError, match="not written by fedtailor"):
        Results.read(run)


def test_a_run_that_has_just_started(tmp_path: Path) -> None:
    results = Results.read(write_run(tmp_path / "r", [], facts(status="running", rounds_done=0)))
    assert results.summary()["personal"] is None
    assert "UNFINISHED" in text_of(results.table())


def test_an_unfinished_run_gives_val_numbers_and_says_so(run: Path) -> None:
    results = Results.read(edit(run, status="stopped"))
    found = results.summary()
    assert (found["finished"], found["split"], found["round"]) == (False, "val", 2)
    assert found["personal"]["mean"] == pytest.approx(0.5)
    assert found["global"] is None  # it was measured on test only, which is not shown
    assert "UNFINISHED" in text_of(results.table())


def test_an_evaluation_cut_short_is_not_a_result(tmp_path: Path) -> None:
    events = [*evaluation(1, "val", personal={0: 0.1, 1: 0.3}), *evaluation(2, "val", personal={0: 0.9})]
    results = Results.read(write_run(tmp_path / "r", events, facts(2, status="running", rounds_done=1)))
    assert results.reported_at() == ("val", 1)
    assert results.summary()["personal"]["mean"] == pytest.approx(0.2)


def test_many_rows_are_all_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [], facts(100))
    rows = 200_000  # several of the pieces that the file is read in
    with (folder / "events.csv").open("a") as file:
        file.writelines(f"{i // 1000},{i % 100},train,m{i // 100 % 10},{i / 7!r}\n" for i in range(rows))
    assert len(Results.read(folder).events) == rows


# ---- comparing


def final(
    folder: Path, seed: int = 0, method: str = "fedavg", values: tuple[float, ...] = (0.2, 0.4), **told: object
) -> Path:
    """A run of which only the end matters."""
    toml = str(told.pop("toml", config(len(values), 2, seed, method)))
    events = evaluation(2, "test", personal=dict(enumerate(values)))
    return write_run(folder, events, facts(len(values), 2, **told), toml)


def test_seeds_are_joined_and_the_two_stds_kept_apart(tmp_path: Path) -> None:
    a = final(tmp_path / "a", seed=0, values=(0.2, 0.4))  # mean 0.3, std over clients 0.1
    b = final(tmp_path / "b", seed=1, values=(0.2, 0.8))  # mean 0.5, std over clients 0.3
    found = compare([a, b])
    (row,) = found.rows
    mean, over_clients, worst = (row.accuracy("personal", n) for n in ("mean", "std", "worst_decile"))
    assert mean
    assert over_clients
    assert worst
    assert (mean.mean, mean.std_over_seeds) == (pytest.approx(0.4), pytest.approx(0.02**0.5))  # ddof 1
    assert over_clients.mean == pytest.approx(0.2)
    assert (worst.mean, worst.std_over_seeds) == (pytest.approx(0.2), pytest.approx(0.0))
    assert row.seeds == (0, 1)
    assert found.fair
    assert "40.00 ± 14.14" in text_of(found.table())


def test_one_run_has_no_std_over_seeds(tmp_path: Path) -> None:
    found = compare([final(tmp_path / "a")])
    mean = found.rows[0].accuracy("personal")
    assert mean is not None
    assert mean.std_over_seeds is None


def test_order(tmp_path: Path) -> None:
    low, high = final(tmp_path / "a", method="low"), final(tmp_path / "b", method="high", values=(0.8, 0.9))
    events = [*evaluation(2, "val", personal={0: 1.0, 1: 1.0})]  # better on val than anybody on test
    half = write_run(tmp_path / "c", events, facts(2, 2, status="stopped"), config(2, 2, 0, "half"))
    assert [row.label for row in compare([half, low, high]).rows] == ["high", "low", "half"]
    assert [row.label for row in compare([half, low, high], order="given").rows] == ["half", "low", "high"]


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("partition", {"partition_hash": "b" * 64}),
        ("data", {"data_hash": "e" * 64}),
        ("rounds", {"toml": config(2, 3, 0, "c")}),
        ("seeds", {"toml": config(2, 2, 5, "c")}),
        ("clients", {"toml": config(9, 2, 0, "c")}),
        ("participants", {"toml": config(2, 2, 0, "c").replace("participants = 2", "participants = 1")}),
        ("unfinished", {"status": "stopped"}),
    ],
)
def test_unfair_differences_are_flagged_on_the_odd_row(tmp_path: Path, flag: str, changes: dict[str, object]) -> None:
    runs = [final(tmp_path / "a", method="a"), final(tmp_path / "b", method="b")]
    assert compare(runs).fair
    found = compare([*runs, final(tmp_path / "c", method="c", **changes)], order="given")
    assert not found.fair
    assert [row.flags for row in found.rows] == [(), (), (flag,)]
    assert any(flag in line for line in found.unfair)
    odd_first = compare([found.rows[2].runs[0], *runs], order="given")
    assert [row.flags for row in odd_first.rows] == [(flag,), (), ()]
    assert "UNFAIR" in text_of(found.table())


def test_labels_tell_rows_of_one_method_apart(tmp_path: Path) -> None:
    slow, fast = (final(tmp_path / str(lr), toml=config(2, lr=lr)) for lr in (0.1, 0.5))
    assert {row.label for row in compare([slow, fast]).rows} == {"fedavg, local.lr 0.1", "fedavg, local.lr 0.5"}
    assert compare([slow, fast]).differing() == {"local.lr": ["0.1", "0.5"]}


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [realistic(tmp_path / place / "same", 6, 4, lift=lift) for place, lift in (("x", 0), ("y", 0.1))]
    found = compare(runs, order="given")
    assert [row.label for row in found.rows] == ["fedavg (x/same)", "fedavg (y/same)"]
    assert found.notes == ("x/same and y/same have the same settings and seed but not the same events.",)


def test_csv_round_trip(tmp_path: Path) -> None:
    runs = [
        final(tmp_path / "a", values=(1 / 3, 0.1)),
        final(tmp_path / "b", method='odd, "name"', toml=config(method="x")),
    ]
    found = compare(runs)
    found.to_csv(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2
    for line, row in zip(lines, found.rows, strict=True):
        for key, value in row.record().items():
            assert line[key] == ("" if value is None else str(value))
    best = next(line for line in lines if line["method"] == "fedavg")
    assert float(best["personal_mean"]) == float(np.mean([1 / 3, 0.1]))  # every digit survives


def test_nothing_to_compare() -> None:
    with pytest.raises(UserError, match="give one or more"):
        compare([])


# ---- identical


def test_identical_forgets_measured_time_and_row_order(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", EVENTS)
    other = [(*e[:4], 9.9) if e[3] == "measured_seconds" else e for e in reversed(EVENTS)]
    b = write_run(tmp_path / "b", other)
    assert identical(a, b)
    found = compare([a, b])
    assert len(found.rows) == 2  # the same seed twice is not two seeds
    assert any("identical" in note for note in found.notes)


def test_identical_sees_one_changed_digit_arch_or_row(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", EVENTS)
    number = write_run(tmp_path / "b", [(1, 0, "train", "loss", 2.0000000000000004), *EVENTS[1:]])
    arch = write_run(tmp_path / "c", [*EVENTS[:-1], (2, 1, "", "personal_arch", "1")])
    row = write_run(tmp_path / "d", EVENTS[:-1])
    assert not identical(a, number)
    assert not identical(a, arch)
    assert not identical(a, row)
    assert any("not the same events" in note for note in compare([a, number]).notes)


def test_identical_with_nan(tmp_path: Path) -> None:
    events = [*EVENTS, (2, 1, "train", "loss", float("nan"))]
    assert identical(write_run(tmp_path / "a", events), write_run(tmp_path / "b", events))
