"""Runs in other tools: what is written there is what the event log says."""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path

import pytest

from fedtailor.engine.loop import Event
from fedtailor.errors import UserError
from fedtailor.runs.execute import Watcher, resume, start
from fedtailor.runs.logs import LOGS, CsvLog, means, with_logs
from fedtailor.runs.results import Results
from synthetic_run import config, write_run
from tools import small_config


def test_means_and_sums() -> None:
    rows = [(0, "train", "loss", 1.0), (1, "train", "loss", 3.0), (1, "val", "accuracy", float("nan"))]
    rows += [(0, "", "bytes_up", 10), (1, "", "bytes_up", 20), (0, "", "arch", "1-0"), (None, "", "late", 0)]
    found = means([Event(1, client, split, metric, value) for client, split, metric, value in rows])
    assert found == {"train/loss": 2.0, "bytes_up": 30.0, "late": 0.0}


class Stop(Watcher):
    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == 3:
            raise KeyboardInterrupt


def test_a_line_per_round_also_across_a_resume(tmp_path: Path) -> None:
    folder, setting = tmp_path / "r", small_config("fedavg", rounds=4, evaluate_every=2, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        start(setting, folder, "cpu", 1, with_logs(Stop(), ["csv"], folder))
    resume(folder, "cpu", 1, with_logs(Watcher(), ["csv"], folder))
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    run = Results.read(folder)
    loss, personal = run.series("loss", "train"), run.series("personal_accuracy", "val")
    assert [float(row["train/loss"]) for row in rows] == pytest.approx(loss.mean.tolist(), rel=1e-12)
    assert float(rows[1]["val/personal_accuracy"]) == pytest.approx(personal.mean[0], rel=1e-12)
    assert rows[0]["val/personal_accuracy"] == ""
    spread = run.spreads["personal"]
    assert spread is not None
    assert float(rows[3]["test/personal_accuracy"]) == pytest.approx(spread.mean, rel=1e-12)
    assert sum(float(row["bytes_up"]) for row in rows) == run.total("bytes_up")


def rounds(log: str, folder: Path, done: int, last: int) -> None:
    watch = with_logs(Watcher(), [log], folder)
    watch.begin("fedavg on digits", done, last)
    for number in range(done + 1, last + 1):
        watch.events(number, [Event(number, 0, "train", "loss", 1 / number)])
    watch.end()


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = write_run(tmp_path / "r", [], toml=config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounds("tensorboard", folder, 0, 3)
        rounds("tensorboard", folder, 2, 4)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("train/loss")
    assert [(e.step, round(e.value, 4)) for e in found] == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 0.25)]


def test_mlflow_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = write_run(tmp_path / "runs" / "r", [], toml=config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounds("mlflow", folder, 0, 2)
        rounds("mlflow", folder, 2, 3)
        from mlflow import MlflowClient

        client = MlflowClient((tmp_path / "runs" / "mlruns").as_uri())
        run = (folder / "mlflow.txt").read_text().strip()
        assert [m.value for m in client.get_metric_history(run, "train/loss")] == [1.0, 0.5, 1 / 3]
        assert client.get_run(run).data.params["method.name"] == "fedavg"


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_extra_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"pip install 'fedtailor\[{name}\]'"):
        with_logs(Watcher(), [name], tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard.writer", "mlflow": "mlflow"}[name], None)
    with pytest.raises(UserError, match=name):
        LOGS[name](write_run(tmp_path / "r", [])).begin("", 0, 1)


def test_an_unknown_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are csv, tensorboard, mlflow"):
        with_logs(Watcher(), ["wandb"], tmp_path)
    plain = Watcher()
    assert with_logs(plain, [], tmp_path) is plain
    assert isinstance(with_logs(plain, ["csv", "csv"], tmp_path).watchers[0], CsvLog)  # type: ignore[attr-defined]
