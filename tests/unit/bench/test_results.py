"""A run's outcome as files, and in the documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.results import BEGIN, END, Results, write_docs
from tests.bench.rows import Limit, Row, at_least

RUN = Results(
    "--size-gib 8",
    [("processor", "one, 16 cores")],
    61.4,
    [Row("load", "ftd", 50.0, "GB/s", limit=Limit("H2D pinned", 55.0), target=at_least(0.9))],
)


def test_results_survive_their_file(tmp_path: Path) -> None:
    RUN.write(tmp_path / "out")
    assert Results.read(tmp_path / "out" / "results.json") == RUN
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "table.md", "plot.svg"}
    assert (tmp_path / "out" / "table.md").read_text() == RUN.text() + "\n"


def test_docs_get_every_run_with_its_plot_and_keep_what_else_they_say(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    without_rates = replace(RUN, rows=[Row("attach", "first", 4.0, "ms")])
    write_docs(page, [RUN, without_rates])
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    assert RUN.text() in text
    assert without_rates.text() in text
    assert text.count("](benchmarks-") == 1
    assert (tmp_path / "benchmarks-1.svg").exists()

    write_docs(page, [RUN, without_rates])
    assert page.read_text() == text


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"])
def test_a_page_without_one_pair_of_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="markers"):
        write_docs(page, [RUN])
    assert page.read_text() == text


def test_the_page_of_this_project_has_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1


def test_a_run_with_a_failed_row_has_failed() -> None:
    assert not RUN.failed
    assert replace(RUN, rows=[*RUN.rows, Row("load", "peer", problem="died")]).failed
    assert not replace(RUN, rows=[Row("load", "peer", problem="not installed", skipped=True)]).failed
