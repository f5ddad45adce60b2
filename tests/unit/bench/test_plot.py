"""The plot of a run: well-formed, a bar for each rate with a limit, as long as its ratio."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.bench.plot import svg
from tests.bench.rows import Limit, Row, at_least, at_most

_SVG = "{http://www.w3.org/2000/svg}"
LINK = Limit("H2D pinned", 50.0)
RATES = [
    Row("publish", "from the page cache", 40.0, "GB/s", limit=Limit("copy", 40.0), target=at_least(0.8)),
    Row("load", "ftd & <push>", 25.0, "GB/s", limit=LINK, target=at_least(0.93)),
    Row("load", "peer", 5.0, "GB/s", limit=LINK, ours=False),
]
OTHERS = [
    Row("attach", "a time", 4.0, "ms", target=at_most(10)),
    Row("load", "not there", problem="not installed", skipped=True),
    Row("load", "wrong bytes", 50.0, "GB/s", limit=LINK, problem="the content differs"),
    Row("stream", "a time against a limit", 130.0, "ms", limit=Limit("roofline", 126.0)),
]


def test_bars_are_as_long_as_ratios_and_only_rates_that_count_have_one() -> None:
    root = ElementTree.fromstring(svg([*OTHERS, *RATES]))
    _ground, *bars = root.findall(f"{_SVG}rect")
    lengths = [int(bar.attrib["width"]) for bar in bars]
    assert len(lengths) == 3
    assert lengths[1] == lengths[0] // 2  # 0.5 and 1.0 of their limits
    assert abs(lengths[2] - lengths[0] / 10) <= 1
    assert bars[1].attrib["fill"] == bars[0].attrib["fill"] != bars[2].attrib["fill"]
    texts = [text.text for text in root.findall(f"{_SVG}text")]
    assert "ftd & <push>" in texts
    assert "not there" not in texts


def test_a_target_is_a_mark_at_its_ratio() -> None:
    root = ElementTree.fromstring(svg(RATES))
    limit, *marks = root.findall(f"{_SVG}line")
    assert len(marks) == 2
    places = [int(mark.attrib["x1"]) for mark in marks]
    assert places[0] < places[1] < int(limit.attrib["x1"])  # 0.8, 0.93, 1.0


def test_everything_stands_inside_the_picture_whatever_the_ratio() -> None:
    root = ElementTree.fromstring(svg([Row("load", "absurd", 5000.0, "GB/s", limit=LINK)]))
    width = int(root.attrib["width"])
    bar = root.findall(f"{_SVG}rect")[1]
    assert int(bar.attrib["x"]) + int(bar.attrib["width"]) < width


def test_a_run_without_such_rates_has_no_plot() -> None:
    assert svg(OTHERS) == ""
