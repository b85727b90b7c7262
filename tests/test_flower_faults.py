"""Faults of a federation over Flower, with real processes, minutes long; `make test-flower` runs them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fedtailor
from fedtailor.certificates import make_certificates
from fedtailor.export.predict import open_model
from fedtailor.runs.execute import start
from test_join import write_digits
from test_remote import NAMES, config_of, require_same, state_of

pytest.importorskip("flwr")


from fedtailor.engine.flower.link import APP, environment, free_port
from fedtailor.engine.flower.loopback import Loopback

pytestmark = pytest.mark.flower
TWO = NAMES[:2]


def served(federation: Loopback, out: Path, *options: str, rounds: int = 6) -> None:
    changes = {"method.name": "ditto", "clients": 3, "participants": 3, "rounds": rounds, "checkpoint_every": 2}
    changes |= {"evaluate_every": 2, "partition.name": "iid", "partition.samples": 60, "local.epochs": 1}
    federation.serve("demo", out, [f"{k}={v}" for k, v in changes.items()], options)


def losses(folder: Path, client: int) -> list[int]:
    """The rounds in which a client's reply was used."""
    table = [row.split(",") for row in (folder / "events.csv").read_text().splitlines()]
    return [int(row[0]) for row in table if row[1] == str(client) and row[3] == "loss"]


def test_a_node_is_killed_and_returns(tmp_path: Path) -> None:
    """And one that is paused beyond the deadline, one whose key nobody knows, and a second one with a key in use."""
    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    rounds = 80  # of a second or two: who was killed can come back after one minute, and has to be there at the end
    try:
        federation.join_all()
        served(federation, out, "--deadline", "20", "--quorum", "1", rounds=rounds)
        federation.until("server", f"round 2/{rounds}")
        federation.kill("client-000")
        federation.until("server", f"round 4/{rounds}")
        federation.join("client-000")
        stranger = Loopback(tmp_path / "strange", ["client-009"], port=federation.port)
        (stranger.keys / "client-009" / "ca.crt").write_bytes((federation.keys / "client-000" / "ca.crt").read_bytes())
        stranger.join("client-009")
        twin = Loopback(tmp_path / "twin", [], port=federation.port)
        shutil.copytree(federation.keys / "client-002", twin.keys / "client-002")
        twin.join("client-002")
        stranger.until("client-009", "does not let this node in")
        twin.until("client-002", "does not let this node in")
        stranger.close()
        twin.close()
        pause(federation, "client-001", 30)
        federation.wait(400)
    finally:
        federation.close()
    log = federation.log("server")
    assert "late: client-001" in log or "late: client-000, client-001" in log
    assert "without a memory" not in log  # a client that returns goes on with what it knew
    assert "client-009" not in log
    assert 3 not in losses(out, 0) or 4 not in losses(out, 0)  # the rounds in which it was dead
    for client in range(3):  # and all are there at the end
        assert losses(out, client)[-1] == rounds
    assert (federation.sites / "client-000" / next_run(federation) / "nets" / "000000.safetensors").exists()


def pause(federation: Loopback, who: str, seconds: float) -> None:
    federation.kill(who, signal.SIGSTOP)
    time.sleep(seconds)
    federation.kill(who, signal.SIGCONT)


def next_run(federation: Loopback) -> str:
    return next((federation.sites / "client-000").glob("ditto-*")).name


def test_server_and_superlink_are_killed_and_go_on_to_the_same_result(tmp_path: Path) -> None:
    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    try:
        federation.join_all()
        served(federation, out)
        federation.until("server", "round 3/6")
        federation.kill("server")
        served(federation, out)
        federation.wait(300)
    finally:
        federation.close()
    from fedtailor.config import load

    local = start(load(out / "config.toml"), tmp_path / "local", "cpu", 1)
    require_same(out, local, federation.sites, NAMES[:3])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_server_ends_its_superlink_without_delay(how: int, tmp_path: Path) -> None:
    """Ctrl-C in a terminal and `systemctl stop` reach both processes at once."""
    federation = Loopback(tmp_path / "fl", NAMES[:3])
    try:
        served(federation, tmp_path / "run")
        federation.until("server", "0 of 3 clients are here")
        process = federation.processes["server"]
        os.killpg(process.pid, how)
        assert process.wait(20) == 130
    finally:
        federation.close()
    assert "Stopped. Continue with the same command" in federation.log("server")
    assert "started again" not in federation.log("server")


def test_a_full_disk_and_a_broken_folder_at_clients(tmp_path: Path) -> None:
    """client-001 has a disk of 60 kB, client-002 an image that is none; client-000 finishes alone."""
    from PIL import Image

    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    for name in NAMES[:3]:
        for label in ("a", "b"):
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(10):
                pixels = np.full((8, 8), 20 * i + 5, np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / label / f"{i}.png")
    (tmp_path / "client-002" / "a" / "0.png").write_bytes(b"broken")
    try:
        for name in NAMES[:3]:
            options = ["--data", f"folder:{tmp_path / name}"]
            federation.join(name, *options)
        limit(federation.processes["client-001"].pid, 20_000)
        served(federation, out, "--start-with", "2", rounds=2)
        federation.wait(200)
    finally:
        federation.close()
    log = federation.log("server")
    assert "client-002 has a problem: its data cannot be used" in log
    assert "0.png" not in log
    assert "0.png" in federation.log("client-002")
    assert "client-001 has a problem: its disk cannot be written" in log
    assert losses(out, 0) == [1, 2]
    assert losses(out, 1) == []


def test_a_newcomer_joins_over_flower_and_takes_its_network_home(tmp_path: Path) -> None:
    """With a key that was made after the run, its own data, its report and its ONNX file on its own disk."""
    federation, out = Loopback(tmp_path / "fl", TWO), tmp_path / "run"
    photos = write_digits(tmp_path / "photos", np.arange(1500, 1560), scale=2)
    changes = ["method.name=fedrep", "clients=2", "participants=2", "rounds=2", "partition.samples=60"]
    try:
        federation.join_all()
        federation.serve("demo", out, [*changes, "partition.name=iid", "local.epochs=1"])
        federation.wait(300)
        make_certificates(federation.keys, [], ["berlin"])
        federation.join("berlin", "--data", f"folder:{photos}", "--export")
        federation.serve(str(out), out, options=["--onboard", "1"])
        federation.wait(200)
        federation.until("berlin", "1 network with card.json")
    finally:
        federation.close()
    (home,) = (p.parent for p in (federation.sites / "berlin").glob("*/run.json"))
    assert (home / "report.html").exists()
    model = open_model(home / "export" / "berlin" / "network.onnx")
    assert model.about["client"] == "berlin"
    assert "berlin has its network: accuracy on" in federation.log("server")
    sends = [line for line in federation.log("berlin").splitlines() if "sends" in line]
    assert len(sends) == 2  # who it is, and its accuracy: the head never leaves
    assert "weights" not in "".join(sends)


def test_a_network_of_40_megabytes_travels_whole(tmp_path: Path) -> None:
    config = config_of("fedavg", clients=2, rounds=1, net__hidden=72_000, partition__samples=20)
    (tmp_path / "config.toml").write_text(config.to_toml())
    federation, out = Loopback(tmp_path / "fl", TWO), tmp_path / "run"
    try:
        federation.join_all()
        federation.serve(str(tmp_path / "config.toml"), out)
        federation.wait(400)
    finally:
        federation.close()
    local = start(config, tmp_path / "local", "cpu", 1)
    require_same(out, local, federation.sites, TWO)
    assert len(state_of(out)) > 40_000_000


def test_flwr_run_gives_the_same_numbers(tmp_path: Path) -> None:
    """Flower's own commands, as those use them who run Flower already."""
    config, port = config_of("fedrep", clients=2, evaluate_every=2), free_port()
    (tmp_path / "config.toml").write_text(config.to_toml())
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f"[superlink.here]\naddress = '127.0.0.1:{port}'\ninsecure = true\n")
    source = str(Path(fedtailor.__file__).parents[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**environment(home), "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def launch(*words: str) -> None:
        with (tmp_path / f"{words[0]}-{len(started)}.log").open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=env, start_new_session=True)
        started.append(process)

    try:
        launch("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        for i in range(2):
            node = f"partition-id={i} state='{tmp_path / 'sites' / TWO[i]}'"
            at = ["--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port())]
            launch("flower-supernode", "--insecure", *at, "--node-config", node)
        time.sleep(10)
        options = f"config='{tmp_path / 'config.toml'}' out='{tmp_path / 'run'}'"
        asked = ["flwr", "run", str(APP), "here", "--run-config", options, "--stream"]
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=400, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    local = start(config, tmp_path / "local", "cpu", 1)
    require_same(tmp_path / "run", local, tmp_path / "sites", TWO)


def limit(process: int, size: int) -> None:
    """No file of the process may grow beyond a size: to it, the disk is full there."""
    import resource

    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, size))
