"""The commands of docs/tutorial-photos.md, as they are written there, on a small folder of painted pictures."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedtailor.cli.main import app
from fedtailor.export.predict import main as predict
from fedtailor.runs.results import Results

TEXT = (Path(__file__).parent.parent / "docs" / "tutorial-photos.md").read_text(encoding="utf-8")
SMALL = {"rounds = 12": "rounds = 1", "evaluate_every = 6": "evaluate_every = 1", "size = 16": "size = 8"}


def blocks(language: str) -> list[str]:
    return [part.split("```", 1)[0] for part in TEXT.split(f"```{language}\n")[1:]]


def paint_office(root: Path) -> None:
    """Four clients that photograph mugs, bikes and backpacks, each in its own light."""
    things = {"mug": (200, 60, 60), "bike": (60, 190, 70), "backpack": (60, 70, 200)}
    for c, client in enumerate(("amazon", "Caltech", "dslr", "webcam")):
        for k, (thing, colour) in enumerate(things.items()):
            (root / client / thing).mkdir(parents=True)
            for i in range(8):
                noise = np.random.default_rng([c, k, i]).normal(0, 30, (12, 12 + c, 3))
                pixels = np.clip(np.array(colour) * (0.7 + 0.1 * c) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / client / thing / f"{i}.png")


def test_the_commands_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paint_office(tmp_path / "office")
    (config,) = blocks("toml")
    for written, small in SMALL.items():
        assert written in config
        config = config.replace(written, small)
    (tmp_path / "office.toml").write_text(config)
    commands = [line for block in blocks("bash") for line in block.strip().splitlines()]
    assert len(commands) == 13
    for command in commands:
        words = shlex.split(command)
        if words[0] == "mv":
            shutil.move(*words[1:])
        elif words[1] == "predict":
            assert predict(words[2:]) == 0
        else:
            done = CliRunner().invoke(app, words[1:])
            worse = words[1] == "personalize" and done.exit_code == 1 and "worse:" in done.output
            assert done.exit_code == 0 or worse, f"{command}\n{done.output}\n{done.exception!r}"
    assert capsys.readouterr().out.count("office/webcam/mug/") == 8
    for page in ("office.html", "comparison.html", "runs/spider/report.html", "runs/three/onboard/dslr/report.html"):
        assert (tmp_path / page).is_file(), page
    cards = sorted(p.parent.name for p in (tmp_path / "runs" / "fedavg-ft" / "export").glob("*/card.html"))
    assert cards == ["Caltech", "amazon", "dslr", "webcam"]
    assert Results.read(tmp_path / "runs" / "three" / "personalize" / "webcam-1").facts["client_names"] == ["webcam"]
