"""The live page without a browser: its views, who is let in, what cannot be reached, and the report's size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from fedtailor import values
from fedtailor.errors import UserError
from fedtailor.report.html import write_report
from fedtailor.runs.execute import start
from fedtailor.runs.results import Results
from fedtailor.ui import networks, searches, views
from fedtailor.ui.freeze import freeze
from fedtailor.ui.server import application, host_of
from fedtailor.ui.shelf import Shelf
from synthetic_run import config, realistic
from tools import small_config

TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shelf")
    realistic(root / "group" / "tailored", 12, 20, method="tailor", search=True, new=3)
    realistic(root / "plain", 10, 8)
    start(small_config("perfedrlnas", fleet__name="uniform-memory"), root / "digits", "cpu", 1)
    return root


@pytest.fixture(scope="module")
def page(shelf: Path) -> TestClient:
    return TestClient(application(shelf), base_url="http://127.0.0.1:8642")


def get(page: TestClient, view: str, **query: Any) -> Any:
    answer = page.get(f"/api/{view}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_runs_are_found_by_their_place(page: TestClient) -> None:
    runs = {run["id"]: run for run in get(page, "runs")["runs"]}
    assert runs.keys() == {"group/tailored", "plain", "digits"}
    assert runs["group/tailored"]["method"] == "tailor"
    assert runs["digits"]["status"] == "done"
    assert (runs["plain"]["split"], runs["plain"]["round"]) == ("test", 8)


def test_numbers_are_those_of_the_results(page: TestClient, shelf: Path) -> None:
    run = Results.read(shelf / "group" / "tailored")
    overview, people = (get(page, view, run="group/tailored") for view in ("overview", "clients"))
    spread = run.spreads["personal"]
    assert spread is not None
    assert overview["spreads"]["personal"]["mean"] == pytest.approx(spread.mean, rel=1e-5)
    assert overview["series"]["personal"]["rounds"] == run.series("personal_accuracy", "val").rounds.tolist()
    assert sum(overview["costs"]["down"]) == pytest.approx(run.total("bytes_down"), rel=1e-5)
    own = run.per_client("personal_accuracy", "test")
    assert people["personal"][:12] == pytest.approx([own[c] for c in range(12)], rel=1e-5)
    assert people["held"] == [False] * 12 + [True] * 3
    assert people["personal"][13] == pytest.approx(run.per_client("new_accuracy", "test")[13], rel=1e-5)
    assert people["samples"][3] == sum(run.facts["train_counts"][3])
    curve = people["curves"]["personal"][4]
    assert curve[0] == round(1e4 * run.per_client("personal_accuracy", "val", 4)[4])
    one = get(page, "client", run="group/tailored", client=4)
    assert len(one["archs"]) == people["rounds_taken"][4]


def test_costs_are_binned_where_rounds_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Results.read(realistic(tmp_path / "r", 10, 20))
    whole = views.costs(run)
    monkeypatch.setattr(views, "POINTS", 6)
    binned = views.costs(run)
    assert (whole["per"], binned["per"], binned["rounds"]) == (1, 4, [4, 8, 12, 16, 20])
    for key in ("down", "up", "flops", "simulated", "participants"):
        assert sum(binned[key]) == pytest.approx(sum(whole[key]))


def test_the_atlas_puts_like_archs_together() -> None:
    options = [[16, 32, 64], ["conv", "pool"], [1, 2]]
    points, explained, order = searches.atlas(
        [[[0], [0], [0]], [[0], [0], [0]], [[2], [1], [1]], [[1], [1], [1]]], options
    )
    assert points[0] == points[1]
    far = lambda a, b: np.hypot(*np.subtract(points[a], points[b]))  # noqa: E731
    assert far(0, 3) < far(0, 2)
    # apart by (16, 32, 64): 1; by operation: 2 * 0.5; by depth: 1
    assert far(0, 2) == pytest.approx(np.sqrt(3), abs=1e-3)
    assert sum(explained) == pytest.approx(1, abs=1e-3)
    assert order in ([0, 1, 3, 2], [2, 3, 0, 1])
    assert searches.atlas([[[0], [0], [0]]], options)[0] == [[0, 0]]


def test_archs_in_words() -> None:
    assert searches.choices("1-0-2", [2, 1, 3]) == [[1], [0], [2]]
    assert searches.choices("0+1-x-2", [2, 1, 3]) == [[0, 1], [], [2]]
    assert searches.choices("0+2-x-2", [2, 1, 3]) is None
    assert searches.choices("?", [2]) is None
    table, good = searches.archs_of(["1-0-2", "1-0", "x-0-1", "1-0-3", "1--2", "0-0-0"], [2, 1, 3])
    assert table[good].tolist() == [[1, 0, 2], [0, 0, 0]]
    assert good.tolist() == [True, False, False, False, False, True]


def test_policies_over_the_rounds(page: TestClient, shelf: Path) -> None:
    found = get(page, "archs", run="digits")["frames"]
    assert found == {"rounds": [1, 2, 3], "source": "policy"}
    frame = get(page, "policy", run="digits", round=3)
    table = np.frombuffer(base64.b64decode(frame["p"]), np.uint8).reshape(frame["clients"], -1)
    sizes = [len(d["options"]) for d in Results.read(shelf / "digits").facts["dimensions"]]
    assert np.abs(table.sum(1) / 255 - len(sizes)).max() < 0.05, "each dimension's probabilities sum to one"
    assert get(page, "policy", run="digits", round=77) is None
    drawn = get(page, "archs", run="group/tailored")["frames"]
    assert drawn["source"] == "draws"
    late = get(page, "policy", run="group/tailored", round=drawn["rounds"][-1])
    assert late["clients"] == 15


def test_devices_drawings_and_shared_weights(page: TestClient) -> None:
    devices = get(page, "devices", run="digits")
    assert all(2e9 <= limit <= 16e9 for limit in devices["limits"]["memory"])
    assert all(0 < used < 1e9 for used in devices["used"]["memory"])
    assert len(devices["shrink"]["shares"]) == 4
    drawing = get(page, "drawing", run="digits", client=1)
    assert drawing["svg"].startswith("<svg")
    assert {other["client"] for other in drawing["shares"]} == {0, 2, 3}
    assert all(0 < other["share"] <= 1 for other in drawing["shares"])


def test_shared_weights_by_hand() -> None:
    from fedtailor.spaces.tiny import Tiny

    space = Tiny((1, 8, 8), 10)
    small, large = space.smallest, space.largest
    archs = {0: small, 1: large}
    whole = sum(int(np.prod(shape)) for shape in space.full_shapes.values())
    [up], [down] = (networks.shared(space, archs, c) for c in (0, 1))
    own = sum(int(np.prod(s)) for s in (networks._sides(space, small, n) for n in space.index(small)))
    assert up["share"] == 1, "the smallest lies within the largest"
    assert down["share"] == pytest.approx(own / whole, rel=1e-3)


def test_confusion_agrees_with_the_reported_accuracy(page: TestClient, shelf: Path) -> None:
    look = get(page, "look", run="digits", client=2)
    matrix = np.array(look["matrix"])
    told = Results.read(shelf / "digits").per_client("personal_accuracy", "test")[2]
    assert look["split"] == "test"
    assert np.trace(matrix) / matrix.sum() == pytest.approx(told)
    assert base64.b64decode((look["right"] + look["wrong"])[0]["png"]).startswith(b"\x89PNG")
    assert "no network of this client" in get(page, "look", run="plain", client=0)["error"]


def test_code_that_came_with_a_run_is_not_loaded(tmp_path: Path) -> None:
    folder = realistic(tmp_path / "r", 10, 4, search=True)
    toml = folder / "config.toml"
    toml.write_text(toml.read_text().replace('[space]\nname = "cnn"', f'[space]\nname = "{tmp_path}/evil.py:Evil"'))
    (tmp_path / "evil.py").write_text("raise SystemExit('loaded')")
    with pytest.raises(UserError, match="does not load"):
        networks.devices(Results.read(folder))
    toml.write_text(config(10, 4, extra=f'[method.more]\nrewards = ["accuracy", "{tmp_path}/evil.py:reward"]\n'))
    with pytest.raises(UserError, match="does not load"):
        networks.look(Results.read(folder), 0)


def test_modules_that_a_run_names_are_not_imported(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import path runs code as a file does: named in the config, in a kept network, or in a run that a run names."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    kept = tmp_path / "kept"
    shutil.copytree(shelf / "digits", kept)
    value = values.read_value(kept / "nets" / "000000.safetensors")
    values.write_value(kept / "nets" / "000000.safetensors", value | {"net": {"name": "evil:Net"}})
    with pytest.raises(UserError, match="does not load"):
        networks.look(Results.read(kept), 0)
    other = tmp_path / "other"
    shutil.copytree(shelf / "digits", other)
    for kind in ("space", "net"):
        toml = other / "config.toml"
        toml.write_text(config(10, 4).replace('[net]\nname = "cnn"', f'[{kind}]\nname = "evil:Net"'))
        for view in (networks.devices, lambda run: networks.drawing(run, 0), lambda run: networks.look(run, 0)):
            with pytest.raises(UserError, match="does not load"):
                view(Results.read(other))
    write_report(other)
    naming = start(small_config("fedavg", space__name="tiny", archs="random"), tmp_path / "naming", "cpu", 1)
    toml = naming / "config.toml"
    toml.write_text(toml.read_text().replace('archs = "random"', f'archs = "{other}"'))
    assert networks.look(Results.read(naming), 0)["matrix"]


def test_what_a_browser_sends_never_becomes_a_path(page: TestClient, shelf: Path, tmp_path: Path) -> None:
    outside = realistic(tmp_path / "secret", 3, 2)
    (shelf / "link").symlink_to(outside)
    inner = shelf / "borrowed"
    shutil.copytree(outside, inner)
    (inner / "events.csv").unlink()
    (inner / "events.csv").symlink_to(outside / "events.csv")
    names = [
        "../secret",
        str(outside),
        "link",
        "borrowed",
        "plain/../plain",
        "%2e%2e/secret",
        ".",
        "",
        "plain\0",
        "plain/",
    ]
    try:
        for name in names:
            assert page.get("/api/overview", params={"run": name}).status_code == 404, name
        listed = {run["id"] for run in get(page, "runs")["runs"]}
        assert not listed & {"link", "borrowed"}
    finally:
        (shelf / "link").unlink()
        shutil.rmtree(inner)
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/build.json",
        "/etc/passwd",
        "/api/nothing",
    ):
        assert page.get(path, params={"run": "plain"}).status_code == 404, path


def test_only_this_machine_is_answered(shelf: Path) -> None:
    page = TestClient(application(shelf))
    for host, code in (("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 421), ("", 421)):
        assert page.get("/api/runs", headers={"host": host}).status_code == code, host
    assert page.get("/", headers={"host": "127.0.0.1.evil.example:80"}).status_code == 421
    assert [host_of(h) for h in ("a:1", "[::1]:1", "b")] == ["a", "::1", "b"]


def test_nobody_writes(page: TestClient) -> None:
    for method in ("post", "put", "delete", "patch", "options"):
        assert getattr(page, method)("/api/runs").status_code == 405


def test_another_address_needs_the_token(shelf: Path) -> None:
    page = TestClient(application(shelf, TOKEN), base_url="http://lab.example:8642")
    assert page.get("/api/runs").status_code == 401
    assert page.get("/").status_code == 401
    assert page.get("/", params={"token": "wrong"}).status_code == 401
    assert page.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert page.get("/", params={"token": TOKEN}).status_code == 200  # by way of a cookie
    assert page.get("/api/runs").status_code == 200


def test_the_command_says_why_a_token(shelf: Path) -> None:
    from fedtailor.cli.ui import ui_command

    with pytest.raises(UserError, match=r"lets other machines in.*--token auto"):
        ui_command(shelf, 0, "0.0.0.0", "", False)
    with pytest.raises(UserError, match="16 characters"):
        ui_command(shelf, 0, "0.0.0.0", "short", False)
    with pytest.raises(UserError, match="not a folder"):
        ui_command(shelf / "nowhere", 0, "127.0.0.1", "", False)


def test_the_page_may_load_nothing_from_elsewhere(page: TestClient) -> None:
    answer = page.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "http" not in policy
    assert not re.search(r"(src|href)=\"(?!static/|data:,)", answer.text)
    assert page.get("/static/app.js").headers["content-type"].startswith("text/javascript")


def test_an_unchanged_view_is_not_sent_again(page: TestClient) -> None:
    first = page.get("/api/overview", params={"run": "plain"})
    tag = {"if-none-match": first.headers["etag"]}
    assert page.get("/api/overview", params={"run": "plain"}, headers=tag).status_code == 304
    assert float(first.headers["x-wait"]) >= 1


def test_broken_runs_are_listed_and_the_others_go_on(tmp_path: Path) -> None:
    good = realistic(tmp_path / "good", 10, 4)
    bad = realistic(tmp_path / "bad", 10, 4)
    other = realistic(tmp_path / "other", 10, 4, format=9)
    page = TestClient(application(tmp_path), base_url="http://localhost")
    assert get(page, "overview", run="bad")["done"] == 4
    (bad / "events.csv").write_text("nothing")
    cards = {card["id"]: card for card in get(page, "runs")["runs"]}
    assert cards["good"]["status"] == "done"
    assert cards["bad"]["status"] == cards["other"]["status"] == "broken"
    assert "format 9" in cards["other"]["problem"]
    assert "empty so far" in get(page, "overview", run="bad")["error"]
    shutil.rmtree(good)
    gone = page.get("/api/overview", params={"run": "good"})
    assert "deleted" in gone.json()["error"]
    assert get(page, "overview", run=other.name)["error"].startswith("this run has format 9")


def test_one_odd_run_hides_no_other(tmp_path: Path) -> None:
    realistic(tmp_path / "good", 10, 4)
    odd = realistic(tmp_path / "odd", 10, 4)
    facts = json.loads((odd / "run.json").read_text())
    (odd / "run.json").write_text(json.dumps({**facts, "client_names": 5}))
    endless = realistic(tmp_path / "endless", 10, 4)
    with (endless / "events.csv").open("a") as file:
        file.write("4,0,val,personal_accuracy,inf\n")
    page = TestClient(application(tmp_path), base_url="http://localhost")
    cards = {card["id"]: card for card in get(page, "runs")["runs"]}
    assert [cards[name]["status"] for name in ("good", "odd", "endless")] == ["done", "broken", "done"]
    assert "TypeError" in cards["odd"]["problem"]
    assert len(get(page, "clients", run="endless")["name"]) == 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep names as text")
def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    root = tmp_path / "r\udcff"
    folder = realistic(root / "b\udcfe", 10, 4)
    realistic(root / "good", 10, 4)
    page = TestClient(application(root), base_url="http://localhost")
    found = get(page, "runs")
    assert found["root"] == r"r\udcff"
    assert {card["id"] for card in found["runs"]} == {r"b\udcfe", "good"}
    assert get(page, "overview", run=r"b\udcfe")["name"] == r"b\udcfe"
    assert [row["finished"] for row in get(page, "compare", run=[r"b\udcfe", "good"])["rows"]] == [True, True]
    (folder / "events.csv").write_text("nothing\n")
    assert "not an event table" in get(page, "overview", run=r"b\udcfe")["error"]
    folder = realistic(root / "c\udcfe", 10, 4)
    assert freeze(Results.read(folder))["overview"]["id"] == r"c\udcfe"


def test_comparison_flags_what_is_unfair(page: TestClient) -> None:
    found = get(page, "compare", run=["plain", "group/tailored"])
    assert not found["fair"]
    assert any("rounds" in text for text in found["unfair"])
    assert [row["method"] for row in found["rows"]] == ["fedavg", "tailor"]


def test_runs_of_several_seeds_are_one_row_of_a_comparison(tmp_path: Path) -> None:
    for method, seed in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        realistic(tmp_path / f"{method}{seed}", 10, 4, seed, method, partition_hash=str(seed) * 64)
    page = TestClient(application(tmp_path), base_url="http://127.0.0.1")
    found = get(page, "compare", run=["a0", "b0", "b1", "a1", "nosuch"])
    assert [[run["id"] for run in row["runs"]] for row in found["rows"]] == [["a0", "a1"], ["b0", "b1"]]
    assert [run["partition"][0] for run in found["rows"][1]["runs"]] == ["0", "1"]
    spreads = [Results.read(tmp_path / name).spreads["personal"] for name in ("b0", "b1")]
    means = [spread.mean for spread in spreads if spread]
    assert found["rows"][1]["personal_mean"] == pytest.approx(np.mean(means), rel=1e-5)
    assert found["rows"][1]["personal_std_over_seeds"] == pytest.approx(np.std(means, ddof=1), rel=1e-5)
    assert [name for name, _ in found["problems"]] == ["nosuch"]
    assert "nosuch" in get(page, "compare", run=["nosuch"])["error"]
    assert "Choose" in get(page, "compare")["error"]


def test_a_server_begun_anew_knows_nothing_of_earlier_versions(tmp_path: Path) -> None:
    realistic(tmp_path / "r", 10, 4)
    answers = []
    for lift in (0.0, 0.1):  # another run takes the first one's place while no server runs
        shutil.rmtree(tmp_path / "r")
        realistic(tmp_path / "r", 10, 4, lift=lift)
        page = TestClient(application(tmp_path), base_url="http://127.0.0.1")
        seen = {"If-None-Match": answers[-1].headers["ETag"]} if answers else {}
        answers.append(page.get("/api/overview", params={"run": "r"}, headers=seen))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["personal"] < answers[1].json()["personal"]


def test_gain_appears_once_it_was_measured(tmp_path: Path) -> None:
    run = Results.read(realistic(tmp_path / "r", 10, 4))
    assert views.gain(run) is None
    (tmp_path / "r" / "gain.csv").write_text(
        "client,architecture_of,test_accuracy,own_minus_this\na,a,0.9,0\na,b,0.8,0.1\nb,a,0.5,0.1\nb,b,0.6,0\n"
    )
    assert views.gain(run) == {"names": ["a", "b"], "accuracy": [[0.9, 0.8], [0.5, 0.6]]}


def test_a_report_of_a_thousand_clients_is_small(tmp_path: Path) -> None:
    folder = realistic(tmp_path / "r", 1000, 12, search=True)
    assert write_report(folder).stat().st_size < 2_500_000


def test_a_report_carries_pictures_of_a_small_run(shelf: Path, tmp_path: Path) -> None:
    text = write_report(shelf / "digits", tmp_path / "r.html").read_text()
    found = json.loads(re.findall(r'id="fedtailor-data">(.*?)</script>', text, re.DOTALL)[0])
    assert {f"{view}&client=3" for view in ("client", "drawing", "look")} <= found.keys()
    assert found["policy&round=3"]["clients"] == 4
    assert str(shelf) not in text


def test_a_root_that_is_a_run(shelf: Path) -> None:
    assert list(Shelf(shelf / "plain").found()) == ["plain"]


def test_the_build_is_in_step_with_its_sources() -> None:
    """The same hash as ui/vite.config.mjs writes: `make ui` builds the page anew."""
    root = Path(__file__).parent.parent
    names = ["package-lock.json", "package.json", "tsconfig.json", "vite.config.mjs"]
    names += [f"src/{path.name}" for path in (root / "ui" / "src").iterdir()]
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(name.encode() + b"\0" + (root / "ui" / name).read_bytes() + b"\0")
    static = root / "src" / "fedtailor" / "ui" / "static"
    assert json.loads((static / "build.json").read_text()) == {"sources": found.hexdigest()}, "run `make ui`"
    assert "</script" not in (static / "app.js").read_text(), "the report puts it into a script element"
    assert "resolved" not in (root / "ui" / "package-lock.json").read_text()
    licences = (static / "LICENSES.txt").read_text()
    assert all(
        name in licences for name in ("preact", "@observablehq/plot", "d3-scale", "Permission is hereby granted")
    )
