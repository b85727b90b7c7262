"""Drawings are well-formed, stand alone, say what they draw and escape what they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
import pytest
from torch import nn

from fedtailor.nets.cnn import CNN
from fedtailor.report.words import SPACE, count
from fedtailor.spaces.base import Arch, Dimension, Space
from fedtailor.spaces.darts import Darts
from fedtailor.spaces.draw import STYLES, _count, cell_svg, cells_svg
from fedtailor.spaces.layers import Chain, ConvNorm
from fedtailor.spaces.tiny import Tiny

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("width") == "900"
    assert " id=" not in text
    assert not re.search(r"\b(nan|inf)\b", text)
    height = float(root.get("height") or 0)
    for part in root.iter():
        assert -1 <= float(part.get("x") or 0) <= 900
        assert -1 <= float(part.get("y") or 0) <= height
    return root


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]


def test_chain_shows_every_piece_and_option():
    space = Tiny((1, 8, 8), 10)
    for arch in (space.smallest, space.largest):
        shown = words(parsed(space.draw(arch)))
        assert {"tiny", "input", "head", *space.pieces(arch)} <= set(shown)
        assert "1 × 8 × 8" in shown
        assert any(line.startswith("stage2") and "width" in line for line in shown)


def test_numbers_of_a_drawing_have_the_units_of_the_page():
    space = Tiny((1, 8, 8), 10)
    shown = words(parsed(space.draw(space.smallest)))
    flops = count(space.cost(space.smallest).flops).replace(SPACE, " ")
    assert flops.endswith(" k")
    assert any(line.endswith(f"parameters, {flops} FLOPs per image") for line in shown)
    assert f"{space.pieces(space.smallest)['head'].cost.flops} FLOPs" in shown  # a few hundred: no unit


def test_chain_of_a_fixed_network():
    shown = words(parsed(CNN((1, 8, 8), 10).draw(())))
    assert "network" in shown


@dataclass(frozen=True)
class Odd(Space):
    """A space with an option whose name and value need escaping."""

    name = 'a<b & "c"'

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return (Dimension("x<y>&", ("<script>", "&amp;")),)

    def build(self, arch: Arch) -> nn.Module:
        return Chain(ConvNorm(self.input[0], 4, 3), 4, self.classes)


def test_text_is_escaped():
    text = Odd((1, 8, 8), 2).draw((0,))
    assert "<script>" not in text
    shown = words(parsed(text))
    assert 'a<b & "c"' in shown
    assert any("<script>" in line for line in shown)
    shown = words(parsed(cell_svg([(0, 2, "<b>&")], title="<Cell>")))
    assert {"<Cell>", "<b>&"} <= set(shown)


def curves(root: ElementTree.Element) -> int:
    return sum(1 for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "2.2")


@pytest.mark.parametrize("variant", ["full", "s1", "s4"])
def test_cells_show_every_operation(variant):
    space = Darts((3, 32, 32), 10, variant=variant)
    arch = space.sample(np.random.default_rng(1))
    for keep in (space.keep_of(arch), space.genotype(*space.new_alpha(2)), space.full_keep):
        edges: Mapping[str, list[tuple[int, int, str]]] = space.edges_of(keep)
        root = parsed(space.draw_keep(keep))
        shown = words(root)
        assert {"Normal cell", "Reduction cell", "concat", "cell k−2"} <= set(shown)
        assert curves(root) == sum(map(len, edges.values()))
        assert {op for kind in edges.values() for _, _, op in kind} <= set(shown)  # the legend
    assert space.draw(arch) == space.draw_keep(space.keep_of(arch))


def test_a_cell_without_operations_is_drawn_as_zeros():
    space = Darts((3, 32, 32), 10)
    shown = words(parsed(space.draw(space.smallest)))
    assert shown.count("zero") == 8
    assert shown.count("0 edges") == 2
    assert cells_svg({}).startswith("<svg")


def test_labels_do_not_lie_on_each_other():
    root = parsed(Darts((3, 32, 32), 10).draw((4,) * 28))
    boxes = [
        tuple(float(r.get(k) or 0) for k in ("x", "y", "width", "height"))
        for r in root.iter(f"{SVG}rect")
        if r.get("height") == "18.0"
    ]
    assert len(boxes) == 28
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x >= a + c or a >= x + w or y >= b + d or b >= y + h


def test_colours_and_numbers():
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert [_count(n) for n in (7, 999, 1_000, 665_466, 999_999, 1_930_618, 2.5e9)] == [
        "7",
        "999",
        "1 k",
        "665 k",
        "1 M",
        "1.93 M",
        "2.5 G",
    ]
