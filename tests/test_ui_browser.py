"""The page and the report in a real Chromium: `make test-ui` runs these. Screenshots are left in artefacts/ui/."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtailor.report.html import write_report
from synthetic_run import realistic

pytestmark = pytest.mark.ui
ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "artefacts" / "ui"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SEARCH = ["--set", "method.name=perfedrlnas", "--set", "fleet.name=uniform-memory"]


def fedtailor(*words: str, **kept: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FEDTAILOR_CACHE": "off"}
    return subprocess.Popen([sys.executable, "-m", "fedtailor", *words], env=environment, text=True, **kept)


def small_run(out: Path, rounds: int) -> subprocess.Popen[str]:
    sizes = ["--set", f"rounds={rounds}", "--set", "evaluate_every=2", "--set", "local.epochs=1"]
    return fedtailor("run", "demo", *SEARCH, *sizes, "--out", str(out), "--workers", "1", "-q")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, lift in (("alpha", 0.0), ("beta", 0.08)):
        folder = realistic(root / name, 60, 24, method=name, lift=lift, search=True, new=4)
        write_report(folder)
    realistic(root / "doomed", 10, 8)
    realistic(root / "other-version", 10, 8, format=9)
    assert small_run(root / "digits", 6).wait(120) == 0
    return root


@pytest.fixture(scope="module")
def address(shelf: Path) -> Iterator[str]:
    server = fedtailor("ui", str(shelf), "--port", "0", stdout=subprocess.PIPE)
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found
    yield found[0]
    server.terminate()
    server.wait(10)
    server.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail("no Chromium here: install it (Debian: apt-get install chromium) and run `make test-ui` again")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page of its own; whatever it complains about fails the test."""
    context = browser.new_context(viewport={"width": 1366, "height": 820}, accept_downloads=True, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(30_000)
    complaints: list[str] = []
    expected: list[str] = []  # failed answers that the test itself brings about
    page.expected = expected
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("http://127.0.0.1", "data:", "blob:", "file:")) else None)  # fmt: skip  # noqa: E501
    yield page
    context.close()
    left = [text for text in complaints if not any(part in text for part in expected)]
    assert not left, left


def shoot(tab: Any, name: str) -> None:
    tab.wait_for_timeout(250)
    tab.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)


def saved(tab: Any, figure: str, kind: str) -> str:
    with tab.expect_download() as download:
        tab.click(f'[data-figure="{figure}"] .tool:has-text("{kind}")')
    return Path(download.value.path()).read_text()


def test_runs_are_listed_searched_and_compared(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.wait_for_selector("a:has-text('alpha')")
    assert tab.locator("tbody tr").count() == 5
    assert "format 9" in tab.inner_text("tr.broken")
    tab.keyboard.press("/")
    tab.keyboard.type("beta")
    assert tab.locator("tbody tr").count() == 1
    tab.fill("#search", "")
    tab.locator(".choose", has_text="Method").locator("select").select_option("alpha")
    assert tab.locator("tbody tr").count() == 1
    tab.locator(".choose", has_text="Method").locator("select").select_option("")
    shoot(tab, "runs")
    for name in ("alpha", "beta"):
        tab.check(f'input[aria-label="choose {name} to compare"]')
    tab.click("text=Compare 2")
    tab.wait_for_selector("text=Pareto front")
    tab.wait_for_selector('[data-figure="compare-2-paired"] .drawing svg')
    assert "alpha" in tab.locator("tbody tr").first.inner_text()
    tab.locator('[data-figure="compare-2-pareto"] select').select_option("simulated")
    tab.wait_for_selector("text=simulated time →")
    rows = saved(tab, "compare-2-pareto", "CSV").splitlines()
    assert rows[0].startswith("run,seed,split,round,simulated,personal")
    assert [row.split(",")[0] for row in rows[1:]] == ["alpha", "beta"]
    shoot(tab, "compare")


def test_clients_are_sorted_filtered_and_opened(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/run/alpha/clients")
    tab.wait_for_selector(".grid-row")
    first = lambda: tab.locator(".grid-row").first.inner_text().split()[1]  # noqa: E731
    lowest = first()
    tab.click('[data-sort="personal"]')
    assert first() != lowest
    assert tab.get_attribute('[aria-sort="descending"] button', "data-sort") == "personal"
    tab.locator(".choose", has_text="Show").locator("select").select_option("worst")
    assert tab.get_attribute("[data-shown]", "data-shown") == "6"  # a tenth of the 60 that trained
    tab.locator(".choose", has_text="Show").locator("select").select_option("all")
    tab.fill("#search", "hospital 03")
    assert tab.get_attribute("[data-shown]", "data-shown") == "11"  # 030 to 039, and 003
    tab.fill("#search", "")
    shoot(tab, "clients")
    tab.focus(".grid")
    for _ in range(40):
        tab.keyboard.press("ArrowDown")
    tab.wait_for_timeout(100)
    assert tab.evaluate("document.querySelector('.grid').scrollTop") > 300
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=Accuracy over the rounds")
    name = tab.inner_text(".client h2 >> nth=0")
    tab.keyboard.press("]")
    tab.wait_for_function("name => document.querySelector('.client h2').innerText !== name", arg=name)
    tab.keyboard.press("Escape")
    tab.wait_for_selector(".grid-row")
    assert tab.get_attribute('[aria-sort="descending"] button', "data-sort") == "personal", "as it was left"
    assert tab.title() == "alpha · fedtailor"
    tab.click(".top >> text=Runs")
    tab.wait_for_selector("text=Compare")
    assert tab.title() == "fedtailor"


def test_one_client_of_a_real_run(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/run/digits/clients/3")
    tab.wait_for_selector('[data-figure="digits-client-3-confusion"] .drawing svg')
    tab.wait_for_selector(".shot img")
    tab.wait_for_selector(".drawn img")
    tab.wait_for_selector("text=weights in common")
    tab.wait_for_selector("text=shared is the supernet")
    rows = saved(tab, "digits-client-3-confusion", "CSV").splitlines()
    assert rows[0] == "run,seed,split,round,client,label,said,images"
    assert sum(int(row.rpartition(",")[2]) for row in rows[1:]) == 36
    drawn = saved(tab, "arch", "SVG")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    shoot(tab, "client")


def test_architectures_and_the_slider(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/run/digits/archs")
    tab.wait_for_selector('[data-figure="digits-atlas"] svg circle, [data-figure="digits-atlas"] svg path')
    slider = tab.locator('input[type="range"]')
    last = tab.inner_text("output")
    before = tab.get_attribute('[data-figure^="digits-policies"] image', "href")
    slider.focus()
    for _ in range(4):
        tab.keyboard.press("ArrowLeft")
    tab.wait_for_function("last => document.querySelector('output').innerText !== last", arg=last)
    tab.wait_for_function(
        "href => document.querySelector('[data-figure^=\"digits-policies\"] image').getAttribute('href') !== href",
        arg=before,
    )
    tab.wait_for_selector("text=Memory against budget")
    figure = tab.get_attribute('[data-figure^="digits-policies"]', "data-figure")
    rows = saved(tab, figure, "CSV").splitlines()
    assert rows[0] == "run,seed,round,client,name,dimension,option,probability"
    assert len(rows) == 1 + 10 * 12
    svg = saved(tab, "digits-atlas", "SVG")
    assert "var(--" not in svg
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    shoot(tab, "archs")
    tab.goto(f"{address}#/run/digits/fairness")
    tab.wait_for_selector("text=Accuracy, client by client")
    tab.locator('[data-figure^="digits-accuracy-against"] select').select_option("flops")
    tab.wait_for_selector("text=FLOPs at clients →")
    shoot(tab, "fairness")
    tab.goto(f"{address}#/run/digits/about")
    tab.wait_for_selector("text=partition hash")
    shoot(tab, "about")


def test_a_live_run_grows(tab: Any, address: str, shelf: Path) -> None:
    run = small_run(shelf / "live", 500)
    try:
        tab.expected += ["404"]  # the folder is not there yet
        tab.goto(f"{address}#/run/live")
        tab.wait_for_selector("[data-done]", timeout=60_000)
        done = lambda: int(tab.get_attribute("[data-done]", "data-done"))  # noqa: E731
        first = done()
        tab.wait_for_function(
            "least => Number(document.querySelector('[data-done]').dataset.done) >= least",
            arg=first + 4,
            timeout=60_000,
        )
        assert tab.locator(".crowd .busy").count() == 5
        assert "Working now" in tab.inner_text("main")
        tab.wait_for_selector('[data-figure="live-loss"] .drawing svg')
        shoot(tab, "live")
    finally:
        run.kill()
        run.wait(20)
    tab.wait_for_selector("text=its process is gone", timeout=20_000)
    tab.goto(address)
    tab.wait_for_selector(".badge.killed")


def test_a_run_that_is_spoilt_while_watched(tab: Any, address: str, shelf: Path) -> None:
    doomed = shelf / "doomed"
    tab.expected += ["404"]
    tab.goto(f"{address}#/run/doomed")
    tab.wait_for_selector("text=Training loss")
    with (doomed / "events.csv").open("a") as file:
        file.write("what is this\n9,0,train,lo")
    tab.wait_for_selector("text=1 line left out", timeout=10_000)
    first = "getComputedStyle(document.querySelector('.warning'), '::first-letter').textTransform"
    assert tab.evaluate(first) == "none", "events.csv is called as it is"
    assert tab.is_visible("text=Training loss")
    shutil.rmtree(doomed)
    tab.wait_for_selector("text=deleted", timeout=10_000)
    assert tab.is_visible("text=Training loss"), "what was seen stays"
    shoot(tab, "deleted")
    tab.click("text=Runs")
    tab.wait_for_selector("a:has-text('alpha')")


def test_a_name_in_a_csv_is_no_formula(tab: Any, address: str, shelf: Path) -> None:
    odd = shelf / "=alpha()"
    shutil.copytree(shelf / "alpha", odd)
    tab.goto(f"{address}#/run/%3Dalpha()")
    tab.wait_for_selector('[data-figure="=alpha()-loss"] .drawing svg')
    rows = saved(tab, "=alpha()-loss", "CSV").splitlines()
    assert {row.split(",")[0] for row in rows[1:]} == {"'=alpha()"}
    shutil.rmtree(odd)


def test_dark_and_narrow(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/run/alpha")
    tab.click('[aria-label="Dark colours"]')
    assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    tab.reload()
    tab.wait_for_selector('[data-figure="alpha-accuracy"] .drawing svg')
    shoot(tab, "dark")
    tab.set_viewport_size({"width": 1024, "height": 700})
    tab.wait_for_timeout(300)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_report_works_from_a_file(tab: Any, shelf: Path) -> None:
    tab.goto((shelf / "digits" / "report.html").as_uri())
    tab.wait_for_selector('[data-figure="digits-accuracy"] .drawing svg')
    tab.wait_for_selector('[data-figure="digits-partition"] .drawing svg')
    assert tab.locator("figure svg").count() >= 12
    shoot(tab, "report")
    rows = saved(tab, "digits-loss", "CSV").splitlines()
    assert rows[0] == "run,seed,split,round,mean,std,participants"
    tab.click(".grid-row >> nth=2")
    tab.wait_for_selector(".shot img")
    tab.wait_for_selector(".drawn img")
    shoot(tab, "report-client")
    pdf = tab.pdf(path=str(SHOTS / "report.pdf"))
    assert pdf.startswith(b"%PDF")
    tab.goto((shelf / "alpha" / "report.html").as_uri())
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    names = tab.locator("#clients th[scope=row]", has_text="hospital")
    assert all(names.nth(i).is_visible() for i in (0, 30, 59)), "on paper every client has a line"
    assert not tab.locator("#clients .grid").is_visible()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details[open]").count() == 0


def test_a_thousand_clients_scroll(tab: Any, address: str, shelf: Path) -> None:
    realistic(shelf / "crowd", 1000, 12, search=True)
    began = time.perf_counter()
    tab.goto(f"{address}#/run/crowd/clients")
    tab.wait_for_selector(".grid-row")
    assert time.perf_counter() - began < 10, "two seconds on a free machine; here others may be at work"
    assert tab.locator(".grid-row").count() < 60, "only the rows on screen exist"
    tab.evaluate("document.querySelector('.grid').scrollTop = 20000")
    tab.wait_for_timeout(300)
    top = tab.evaluate("Math.min(...[...document.querySelectorAll('.grid-row')].map(r => parseInt(r.style.top)))")
    assert top > 15_000
    shoot(tab, "crowd")


def test_seeds_share_a_row_and_pairs_share_a_seed(tab: Any, browser: Any, address: str, shelf: Path) -> None:
    for method, seed in (("one", 0), ("one", 1), ("two", 0), ("two", 1)):
        lift = 0.15 if method == "two" else 0.0
        realistic(shelf / "grid" / f"{method}-{seed}", 20, 8, seed, method, lift, partition_hash=str(seed) * 64, new=2)
    realistic(shelf / "half", 20, 20, method="half", status="stopped")
    runs = [f"grid%2F{name}" for name in ("one-0", "one-1", "two-1", "two-0")]
    tab.goto(f"{address}#/compare/{'/'.join(runs)}/half")
    tab.wait_for_selector('[data-figure="compare-5-paired"] .drawing svg')
    assert tab.locator("main > .tablewrap tbody tr").count() == 3
    assert "± " in tab.locator("main > .tablewrap tbody tr").first.inner_text()
    pairs = [row.split(",") for row in saved(tab, "compare-5-paired", "CSV").splitlines()]
    assert pairs[0] == ["run", "seed", "split", "client", "name", "first", "this"]
    assert sorted((row[1], int(row[3])) for row in pairs[1:]) == [(s, c) for s in "01" for c in range(20)]
    assert "half (val, round 12)" in tab.inner_text('[data-figure="compare-5-paired"] figcaption')
    ends = saved(tab, "compare-5-pareto", "CSV").splitlines()
    assert [row.partition(",")[0] for row in ends[1:]] == ["one", "two"], "half a run has half the costs"
    with tab.expect_download() as download:
        tab.click('[aria-label="CSV of the rows"]')
    lines = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    for line in lines[:2]:  # the whole run's time, as `fedtailor compare` has it; rounds alone take less
        assert float(line["measured"]) == float(line["measured_seconds"]) > 0
    picture = saved(tab, "compare-5-curves", "SVG")
    words = [
        "".join(text.itertext()) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"one", "two", "half (val, round 12)"} <= set(words), "a saved picture has its key"
    assert any("better" in word for word in re.findall(r">([^<]+)</text>", saved(tab, "compare-5-paired", "SVG")))
    tab.evaluate("document.querySelector('[data-figure=compare-5-curves] .drawing svg').dataset.mark = 'here'")
    for _ in range(10):  # the page has asked for all five again, twice
        tab.wait_for_event("response", lambda answer: "api/overview" in answer.url, timeout=60_000)
    tab.wait_for_timeout(500)
    assert tab.locator("[data-figure=compare-5-curves] svg[data-mark]").count() == 1, (
        "nothing changed: nothing is redrawn"
    )
    shoot(tab, "compare-seeds")


def test_the_page_of_a_comparison_works_from_a_file(tab: Any, shelf: Path, tmp_path: Path) -> None:
    runs = [realistic(tmp_path / f"m{i}", 12, 8, method=f"m{i}", lift=i / 50) for i in range(8)]
    assert (
        fedtailor("compare", *map(str, runs), "--html", str(tmp_path / "c.html"), stdout=subprocess.DEVNULL).wait() == 0
    )
    tab.goto((tmp_path / "c.html").as_uri())
    tab.wait_for_selector('[data-figure="comparison-paired"] .drawing svg')
    marks = tab.eval_on_selector_all(
        '[data-figure="comparison-curves"] .keys path',
        "marks => marks.map(m => m.getAttribute('stroke') + m.getAttribute('stroke-dasharray'))",
    )
    assert len(set(marks)) == 8, "two of eight lines look the same"
    assert tab.locator('[data-figure="comparison-paired"] .panels svg').count() == 7
    unnamed = "all => all.filter(s => !s.labels[0]?.innerText && !s.labels[0]?.textContent.trim()).length"
    assert tab.eval_on_selector_all("select", unnamed) == 0
    shoot(tab, "comparison")


def test_one_architecture_is_no_map_and_what_was_not_sent_has_no_colour(tab: Any, address: str, shelf: Path) -> None:
    folder = realistic(shelf / "same", 8, 8, search=True)
    table = re.sub(r"personal_arch,.*", "personal_arch,0-1-2-1", (folder / "events.csv").read_text())
    (folder / "events.csv").write_text(table)
    tab.goto(f"{address}#/run/same/archs")
    tab.wait_for_selector("text=8 clients keep one and the same architecture")
    tab.wait_for_selector('[data-figure="same-policies-round-8"] image')
    assert tab.locator('[data-figure="same-atlas"]').count() == 0, "equal points have no places"
    sent = {int(row.split(",")[1]) for row in table.splitlines() if ",arch," in row and row.startswith("1,")}
    slider = tab.locator('input[type="range"]')
    slider.focus()
    tab.keyboard.press("Home")
    tab.wait_for_selector('[data-figure="same-policies-round-1"] image')
    tab.wait_for_timeout(500)
    pixels = tab.evaluate(
        """async () => {
          const image = new Image();
          image.src = document.querySelector('[data-figure="same-policies-round-1"] image').getAttribute("href");
          await image.decode();
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [image.width, image.height];
          const brush = canvas.getContext("2d", {willReadFrequently: true});
          brush.drawImage(image, 0, 0);
          return [...Array(image.height).keys()].map(y => [...brush.getImageData(0, y, 1, 1).data]);
        }"""
    )
    assert sum(alpha == 255 for *_, alpha in pixels) == len(sent) < 8


def test_nobody_is_missing_from_the_pictures(tab: Any, address: str, shelf: Path) -> None:
    tab.goto(f"{address}#/run/alpha/fairness")
    tab.wait_for_selector('[data-figure="alpha-gain-over-global"] .drawing svg')
    for figure in ("alpha-distribution", "alpha-gain-over-global"):
        tall = tab.eval_on_selector_all(
            f'[data-figure="{figure}"] g[aria-label="rect"] rect', "bars => bars.map(b => b.height.baseVal.value)"
        )
        ticks = tab.eval_on_selector_all(
            f'[data-figure="{figure}"] g[aria-label^="y-axis tick label"] text',
            "all => all.filter(t => t.textContent).map(t => [Number(t.textContent), t.transform.baseVal[0].matrix.f])",
        )
        (low, y0), (high, y1) = ticks[0], ticks[-1]
        clients = sum(round((high - low) * (h + 1.2) / (y0 - y1)) for h in tall)
        assert clients == 60, figure


def test_no_label_of_an_axis_is_cut_off(tab: Any, address: str, shelf: Path) -> None:
    sizes = ["--set", "rounds=1", "--set", "local.epochs=1"]
    search = ["--set", "method.name=perfedrlnas", "--set", "fleet.name=capacity-low"]
    assert fedtailor("run", "demo", *search, *sizes, "--out", str(shelf / "capacity"), "-q").wait(120) == 0
    tab.goto(f"{address}#/run/capacity/archs")
    figure = '[data-figure="capacity-budget-flops"] .drawing'
    tab.wait_for_selector(f"{figure} svg", timeout=60_000)
    left = tab.eval_on_selector(figure, "box => box.getBoundingClientRect().left")
    starts = tab.eval_on_selector_all(f"{figure} svg text", "all => all.map(t => t.getBoundingClientRect().left)")
    assert starts
    assert min(starts) >= left


def test_a_broken_address_and_the_cursor(tab: Any, address: str, shelf: Path) -> None:
    tab.expected += ["404"]
    tab.goto(f"{address}#/run/%E0%A4%A")
    tab.wait_for_selector("text=There is no such run here")
    tab.goto(f"{address}#/run/alpha/clients")
    tab.wait_for_selector(".grid-row")
    tab.focus(".grid")
    tab.keyboard.press("ArrowDown")
    active = tab.get_attribute(".grid", "aria-activedescendant")
    assert tab.get_attribute(f"#{active}", "aria-rowindex") == "3"  # the head is the first
    assert tab.get_attribute(f"#{active}", "aria-selected") == "true"
