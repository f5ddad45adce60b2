"""Rows of streaming: what contestants found, as JSON carried it, against the roofline and what is promised."""

from __future__ import annotations

from typing import Any

from tests.bench.rows import Row
from tests.bench.stream import verdict

RESIDENT: dict[str, Any] = {
    "link_bytes_per_s": 50e9, "layer_bytes": 5e9, "ms": {"64": 4.0, "4096": 110.0},
    "roofline_ms": {"64": 100.0, "4096": 110.0}, "activation_bytes": {"64": 1, "4096": 2},
}  # fmt: skip
STREAMED: dict[str, Any] = {
    "offload_s": 0.2, "setup_s": 0.5, "gpu_bytes": 1e9, "ring_bytes": 1e9, "allocated_bytes": 1.001e9,
    "ms": {"64": 100.5, "4096": 115.0}, "first_forward_ms": 110.0, "predicted_ms": 102.0,
    "equal": {"64": True, "4096": True},
}  # fmt: skip


def _rows(name: str, **found: dict[str, Any]) -> dict[str, Row]:
    return {row.what: row for row in verdict.rows(name, found, layers=10)}


def test_what_streams_everything_is_judged_against_the_roofline_of_its_count() -> None:
    rows = _rows("ftd_all_streamed", resident=RESIDENT, ftd_all_streamed=STREAMED)
    assert (rows["ftd_all_streamed: 64 tokens"].ratio, rows["ftd_all_streamed: 64 tokens"].verdict) == (1.005, "met")
    assert rows["ftd_all_streamed: 4096 tokens"].verdict == "missed"
    assert {row.verdict for what, row in rows.items() if "tokens" not in what} == {"met"}


def test_outputs_that_differ_are_counted_and_missed() -> None:
    wrong = STREAMED | {"equal": {"64": True, "4096": False}}
    rows = _rows("ftd_all_streamed", resident=RESIDENT, ftd_all_streamed=wrong)
    row = rows["ftd_all_streamed: outputs that differ from the resident model's"]
    assert (row.value, row.verdict) == (1, "missed")


def test_memory_mode_is_judged_beside_the_peer_that_had_the_same_memory() -> None:
    one = {field: {"64": value} for field, value in STREAMED.items() if field not in ("ms", "equal")}
    one |= {"ms": {"64": 60.0}, "equal": {"64": True}, "streamed_bytes": {"64": 2.95e9}}
    peer = {"ms": {"64": 75.0}, "gpu_bytes": {"64": 1e9}, "setup_s": {"64": 12.0}}
    rows = _rows("ftd_memory", resident=RESIDENT, flextensor_memory=peer, ftd_memory=one)
    assert (rows["ftd_memory, 64 tokens ÷ FlexTensor"].value, rows["ftd_memory, 64 tokens ÷ FlexTensor"].verdict) == (
        0.8,
        "met",
    )
    ideal = rows["ftd_memory, 64 tokens ÷ (streamed bytes ÷ link)"]
    assert ideal.value == 60 / 59
    assert ideal.verdict == "met"
    assert "ftd_memory, 64 tokens ÷ FlexTensor" not in _rows("ftd_memory", resident=RESIDENT, ftd_memory=one)


def test_peers_promise_nothing_and_say_what_they_cost() -> None:
    peer = {"ms": {"64": 130.0, "4096": 140.0}, "setup_s": 3.5, "peak_bytes": 5.2e9}
    rows = list(verdict.rows("diffusers", {"resident": RESIDENT, "diffusers": peer}, layers=10))
    assert [row.note for row in rows] == ["set-up 3.50 s; GPU peak 5.20 GB", ""]
    assert {(row.verdict, row.ours) for row in rows} == {("", False)}


def test_one_that_could_not_take_part_is_a_row_with_the_reason() -> None:
    (row,) = verdict.rows("flextensor_memory", {"flextensor_memory": {"skipped": "not installed"}}, layers=10)
    assert (row.verdict, row.problem, row.ours) == ("skipped", "not installed", False)
    (row,) = verdict.rows("ftd_hooks", {"ftd_hooks": {"error": "took more than 300 s"}}, layers=10)
    assert (row.verdict, row.ours) == ("failed", True)


def test_without_the_resident_model_there_is_no_roofline() -> None:
    rows = _rows("ftd_all_streamed", ftd_all_streamed=STREAMED)
    assert rows["ftd_all_streamed: 64 tokens"].ratio is None
    assert rows["ftd_all_streamed: 64 tokens"].verdict == ""
