"""Rows of benchmarks: what they are judged by, and how they are shown."""

from __future__ import annotations

import pytest

from tests.bench.rows import Limit, Row, at_least, at_most, row, table

LINK = Limit("H2D pinned", 55.4)


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (Row("load", "a", 52.0, "GB/s", limit=LINK, target=at_least(0.93)), "met"),
        (Row("load", "a", 51.0, "GB/s", limit=LINK, target=at_least(0.93)), "missed"),
        (Row("attach", "a", 10.0, "ms", target=at_most(10)), "met"),
        (Row("attach", "a", 10.1, "ms", target=at_most(10)), "missed"),
        (Row("load", "a", 52.0, "GB/s", limit=LINK), ""),
        (Row("load", "a", problem="not installed", skipped=True), "skipped"),
        (Row("load", "a", problem="took more than 60 s"), "failed"),
    ],
)
def test_a_target_judges_the_ratio_where_there_is_a_limit_and_else_the_figure(one: Row, verdict: str) -> None:
    assert one.verdict == verdict


def test_a_figure_that_does_not_count_is_shown_and_meets_nothing() -> None:
    wrong = Row("load", "a", 55.0, "GB/s", limit=LINK, target=at_least(0.9), problem="the content differs")
    assert wrong.verdict == "failed"
    assert "| a | 55.00 GB/s | 0.993 of 55.40 GB/s H2D pinned | ≥ 0.9 | **failed** | the content differs |" in table(
        [wrong]
    )


def test_what_a_process_found_becomes_a_row_whatever_it_is() -> None:
    assert row("load", "a", {"s": 0.004}, "s", per=1e-3, unit="ms").value == pytest.approx(4)
    skipped = row("load", "a", {"skipped": "x is not installed"}, "s", unit="ms", ours=False)
    assert (skipped.verdict, skipped.problem, skipped.value, skipped.ours) == (
        "skipped",
        "x is not installed",
        None,
        False,
    )
    assert row("load", "a", {"error": "died"}, "s").verdict == "failed"


def test_a_table_has_a_head_a_line_for_each_part_and_one_for_each_row() -> None:
    text = table(
        [
            Row("attach", "first", 4.2, "ms", target=at_most(10)),
            Row("attach", "again", 3.5, "ms", note="median"),
            Row("load", "peer", problem="a|b", skipped=True, ours=False),
        ]
    )
    assert text.splitlines() == [
        "| what | measured | of the limit | target | verdict |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| **attach** |  |  |  |  |  |",
        "| first | 4.200 ms |  | ≤ 10 ms | met |  |",
        "| again | 3.500 ms |  |  |  | median |",
        "| **load** |  |  |  |  |  |",
        "| peer | – |  |  | skipped | a/b |",  # no cell more than the head has
    ]


def test_a_row_survives_its_file() -> None:
    for one in (
        Row("load", "a", 52.0, "GB/s", limit=LINK, target=at_least(0.93), note="n"),
        Row("load", "b", problem="none here", skipped=True, ours=False),
    ):
        assert Row.of(one.plain()) == one
