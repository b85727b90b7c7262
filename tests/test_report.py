"""The HTML pages: complete, self-contained, escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from synthetic_run import config, evaluation, facts, realistic, write_run

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from fedtailor.errors import UserError
from fedtailor.report import words
from fedtailor.report.archs import parse
from fedtailor.report.html import write_comparison, write_report
from fedtailor.report.similarity import similarity_svg
from fedtailor.runs.compare import compare
from fedtailor.runs.results import Results, duration
from fedtailor.ui.freeze import STATIC

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "line", "circle", "stop"}


class Page(HTMLParser):
    """What a browser would do with a page: its tags, what they fetch, their ids, and whether they nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.anchors: list[str] = []
        self.open: list[str] = []
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            address = (value or "").strip()
            if name == "id":
                self.ids.append(address)
            loads = name in ("src", "srcset", "data", "poster", "action") or (name.endswith("href") and tag != "a")
            if loads and not address.startswith("#"):
                self.fetched.append(address)
            if tag == "a" and name == "href":
                self.anchors.append(address)
            assert not name.startswith("on"), f"{tag} has an event handler"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open
            assert self.open.pop() == tag

    def check(self) -> None:
        assert not self.open
        assert not self.fetched
        assert not {"iframe", "object", "embed", "link", "base", "form"} & set(self.tags)
        assert "@import" not in self.source
        text = self.source
        if "script" in self.tags:  # the report's own: its data and its drawings, the latter named by their hash
            assert self.tags.count("script") == 2
            script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"script-src 'sha256-{digest}';" in text
            text = text.replace(script, "")
        assert not re.search(r"url\((?!#)", text)
        assert len(self.ids) == len(set(self.ids)), "two drawings share an id"
        assert all(a[1:] in self.ids for a in self.anchors if a.startswith("#"))
        assert all(a.startswith(("#", "https://")) for a in self.anchors)


def carried(page: Page) -> dict:
    """What the report's pictures are drawn from."""
    return json.loads(re.findall(r'id="fedtailor-data">(.*?)</script>', page.source, re.DOTALL)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return realistic(tmp_path_factory.mktemp("runs") / "tailored", 12, 20, method="tailor", search=True, new=3)


def test_a_report_holds_everything(folder: Path) -> None:
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path)
    page.check()
    text = page.source
    for section in (
        "result",
        "setting",
        "rounds",
        "clients",
        "architectures",
        "fairness",
        "method",
        "meaning",
        "reproduce",
    ):
        assert f'id="{section}"' in text
    run = Results.read(folder)
    for spread in run.spreads.values():
        assert spread is not None
        assert words.percent(spread.mean) in text
        assert words.percent(spread.worst_decile) in text
    told = (
        "fedtailor run --method tailor --seed 0",
        "a" * 64,
        "d" * 64,
        "2.13.0",
        "hospital 007",
        "arXiv:1602",
    )
    for part in (*told, "clients are drawn without replacement", "Worst decile"):
        assert part in text
    views = carried(page)
    assert views["overview"]["spreads"]["personal"]["mean"] == pytest.approx(run.spreads["personal"].mean, rel=1e-5)
    assert views["archs"]["dimensions"][3]["options"] == ["conv", "mbconv"]
    assert len(views["clients"]["name"]) == 15
    assert {f"client&client={c}" for c in range(15)} <= views.keys()
    assert any(name.startswith("policy&round=") for name in views)
    assert "UNFINISHED" not in text
    assert "fetches nothing" in text


def test_drawings_do_not_depend_on_chance(folder: Path, tmp_path: Path) -> None:
    assert (
        write_report(folder, tmp_path / "a.html").read_bytes() == write_report(folder, tmp_path / "b.html").read_bytes()
    )


def test_a_fixed_network_has_no_architectures(tmp_path: Path) -> None:
    text = write_report(realistic(tmp_path / "r", 10, 8), tmp_path / "deep" / "page.html").read_text()
    assert 'id="architectures"' not in text


def test_an_unfinished_run_is_loud(tmp_path: Path) -> None:
    page = Page(write_report(realistic(tmp_path / "r", 10, 20, status="stopped")))
    page.check()
    assert "UNFINISHED RUN: 12 of 20 rounds" in page.source
    assert 'role="alert"' in page.source


@pytest.mark.parametrize("status", ["running", "done"])
def test_almost_empty_runs(tmp_path: Path, status: str) -> None:
    started = write_run(tmp_path / "r", [], facts(status=status, rounds_done=0, train_counts=[], method_paper=""))
    Page(write_report(started)).check()
    Page(write_comparison([started], tmp_path / "c.html")).check()


def test_one_client_one_round_and_nan(tmp_path: Path) -> None:
    events = [(1, 0, "train", "loss", float("nan")), *evaluation(1, "val", personal={0: 1.0})]
    events += evaluation(1, "test", personal={0: 1.0, 1: float("nan")}, **{"global": {0: 0.0, 1: float("nan")}})
    Page(write_report(write_run(tmp_path / "r", events, facts(2, 1)))).check()


def test_user_strings_are_escaped(tmp_path: Path) -> None:
    strings = {
        "client_names": [EVIL, '"><img src=x onerror=alert(1)>', "$\\alpha$ & _co", *["c"] * 9],
        "classes": [EVIL, "b'\"", *"cdefghij"],
        "method_paper": f"{EVIL} javascript:alert(1) https://example.org/a<b",
        "deviations": [EVIL],
        "command": f"fedtailor run {EVIL}",
        "device": EVIL,
        "partition_hash": EVIL,
        "dimensions": [
            {"name": EVIL, "options": [EVIL, "a", "b"]},
            *({"name": f"d{i}", "options": [EVIL, "$x$", 3, 4][:n]} for i, n in enumerate((4, 3, 2))),
        ],
    }
    evil = realistic(tmp_path / f"run {EVIL}".replace("/", "-"), 12, 8, search=True, **strings)
    toml = evil / "config.toml"
    toml.write_text(toml.read_text().replace('"dirichlet"', f'"{EVIL}"').replace('"fedavg"', f'"{EVIL}"'))
    for path in (write_report(evil), write_comparison([evil, realistic(tmp_path / "_$b", 12, 8)], tmp_path / "c.html")):
        page = Page(path)
        page.check()
        written = page.source.replace((STATIC / "app.js").read_text(), "")
        assert "<script>alert" not in written.lower()
        assert "<img" not in written
        assert "&lt;script&gt;" in written


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep names as text")
def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    page = write_report(realistic(tmp_path / "b\udcff", 12, 8))
    assert "b\\udcff" in page.read_text(encoding="utf-8")


def test_comparison_page(tmp_path: Path) -> None:
    runs = [
        realistic(tmp_path / f"{m}{s}", 12, 8, seed=s, method=m, lift=up)
        for m, up in (("a", 0), ("b", 0.1))
        for s in (0, 1)
    ]
    runs.append(realistic(tmp_path / "c", 12, 8, method="c", partition_hash="b" * 64))
    page = Page(write_comparison(runs, tmp_path / "c.html"))
    page.check()
    for part in ("Unfair:", "partition", "std over clients", "std over seeds", "method.name", "±"):
        assert part in page.source
    views = carried(page)
    rows = {row["label"]: row for row in views["compare"]["rows"]}
    assert [len(rows[label]["runs"]) for label in "abc"] == [2, 2, 1]
    means = [Results.read(run).spreads["personal"].mean for run in runs[:2]]
    assert rows["a"]["personal_mean"] == pytest.approx(sum(means) / 2, rel=1e-5)
    assert rows["a"]["personal_std_over_seeds"] == pytest.approx(abs(means[0] - means[1]) / 2**0.5, rel=1e-5)
    for row in rows.values():  # what the pictures need of every run, and nothing that only the page of a run shows
        assert all(run["id"] in views["overviews"] for run in row["runs"])
        assert all(views["people"][run["id"]].keys() == {"split", "name", "personal", "held"} for run in row["runs"])
    compare(runs).to_html(tmp_path / "same.html")
    assert (tmp_path / "same.html").read_text() == page.source


def test_many_rows_are_all_on_the_page(tmp_path: Path) -> None:
    runs = [realistic(tmp_path / f"m{i}", 10, 4, method=f"m{i}") for i in range(9)]
    page = Page(write_comparison(runs, tmp_path / "c.html"))
    page.check()
    assert all(f"<td>m{i}" in page.source or f">m{i}<" in page.source for i in range(9))


def test_the_page_is_not_a_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        write_report(folder, tmp_path)


def _compare_one(folder: Path, out: Path) -> Path:
    return write_comparison([folder], out)


def _policies(*_: Path) -> str:
    return similarity_svg([[1, 0], [0, 1], [1, 1]], [[[0.5, 0.5]] * 3])


@pytest.mark.parametrize(
    ("missing", "write"), [("jinja2", write_report), ("jinja2", _compare_one), ("matplotlib", _policies)]
)
def test_missing_extras_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, write: Callable[[Path, Path], object]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"pip install 'fedtailor\[report\]'"):
        write(folder, tmp_path / "r.html")


def test_words() -> None:
    space = words.SPACE
    assert words.percent(0.12345) == f"12.35{space}%"
    assert words.percent(None) == words.percent(float("nan")) == "–"
    assert words.count(7) == "7"
    assert words.count(1_234_567) == f"1.23{space}M"
    assert words.count(999_999) == f"1.00{space}M"
    assert words.size(1500) == f"1.50{space}kB"
    assert duration(59.96) == "60.0 s"
    assert duration(3 * 3600 + 60) == "3 h 01 min"
    assert words.setting([1, 0.5, True, "a"]) == "1, 0.5, yes, a"
    assert words.moment("2025-11-15T12:00:00+00:00") == "2025-11-15 12:00 UTC"
    assert words.moment("soon") == "soon"
    assert words.pieces_with_links("A, arXiv:2103.00710.") == [
        ("A, ", None),
        ("arXiv:2103.00710", "https://arxiv.org/abs/2103.00710"),
        (".", None),
    ]


def test_one_client_is_one_client(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", evaluation(2, "test", personal={0: 0.5}), facts(1), config(1))
    assert "split over 1 client (" in words.sentence(Results.read(run))


def test_the_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", evaluation(2, "test", personal={0: 0.5, 1: 0.7}), facts(2), config(2))
    assert words.sentence(Results.read(run)).replace(words.SPACE, " ") == (
        "fedavg trained cnn for 2 rounds on digits, split over 2 clients (all in every round); after the last round a "
        "client’s own network gets 60.0 % of its test samples right on average (50.0 % for the tenth of clients that "
        "fare worst)."
    )


def test_arch_text() -> None:
    assert parse("1-0-2", [2, 1, 3]) == (1, 0, 2)
    assert parse("1-0", [2, 1, 3]) is None
    assert parse("1-0-3", [2, 1, 3]) is None
    assert parse("one", [2]) is None


def test_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedtailor.cli.report import Order, compare_command, report_command

    report_command(folder, tmp_path / "r.html")
    compare_command([folder], tmp_path / "c.csv", tmp_path / "c.html", Order.given)
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "c.csv", "c.html"}
    assert "personal" in capsys.readouterr().out
