"""What diagnostics log of a plan."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import ftd_client
from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, EvenSpread, make_plan
from ftd_client import OffloadConfig
from ftd_client.phase.diagnostics import assignment_table, durations_table

COST = CopyCost(1_000, 1e9)


def rows(table: str) -> list[list[str]]:
    return [[cell for cell in line.split("  ") if cell] for line in table.splitlines()]


def blocks(compute_ns: int = 0) -> tuple[Block, ...]:
    return (
        Block(0, "(before)", "", 0, compute_ns),
        *(Block(i, f"layer.{i}", f"layer.{i}", 2048, compute_ns) for i in range(1, 5)),
    )


def test_every_block_has_its_place_and_times() -> None:
    plan = make_plan(Problem(blocks(5_000_000), COST, num_blocks=2, min_blocks=2), AllStreamed())
    head, before, first, *rest = rows(assignment_table(plan, COST))
    assert [cell.strip() for cell in head] == ["block", "bytes", "place", "compute", "copy", "stall", "copied after"]
    assert [cell.strip() for cell in before] == ["(before)", "0 B", "resident", "5.0 ms", "-", "-", "-"]
    assert [cell.strip() for cell in first] == [
        "layer.1", "2.00 KiB", "[0, 2,048)", "5.0 ms", "3 µs", "-", "layer.3 (before)",
    ]  # fmt: skip
    assert [row[0].strip() for row in rest] == ["layer.2", "layer.3", "layer.4"]
    assert rest[1][-1].strip() == "layer.1"


def test_what_is_not_known_or_does_not_move_is_a_dash() -> None:
    plan = make_plan(Problem(blocks(), COST, budget_bytes=1 << 20), EvenSpread())
    assert not plan.placements
    for row in rows(assignment_table(plan, COST))[1:]:
        assert [cell.strip() for cell in row[2:]] == ["resident", "-", "-", "-", "-"]


def test_durations_are_their_range_and_median() -> None:
    table = durations_table([("a", [3_000_000, 1_000_000, 2_000_000]), ("b#2", [4_000, 2_000])])
    assert [[cell.strip() for cell in row] for row in rows(table)] == [
        ["block", "forwards", "least", "median", "most"],
        ["a", "3", "1.0 ms", "2.0 ms", "3.0 ms"],
        ["b#2", "2", "2 µs", "3 µs", "4 µs"],
    ]


@pytest.mark.parametrize("on", [True, False])
def test_each_plan_is_logged_when_asked_for(caplog: pytest.LogCaptureFixture, on: bool) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(False)
    caplog.set_level(logging.INFO, "ftd")
    config = OffloadConfig(
        include_patterns=["*"], pinned_memory=False, profiling_iters=2, load_strategy=AllStreamed(),
        enable_diagnostics=on,
    )  # fmt: skip
    ftd_client.offload(model, config, "diagnostics")
    try:
        for _ in range(4):
            model(torch.ones(1, 16))
    finally:
        ftd_client.release("diagnostics")
    texts = [record.getMessage() for record in caplog.records]
    tables = [text for text in texts if text.startswith("blocks of the plan (strategy all_streamed):\n")]
    spans = [text for text in texts if text.startswith("compute per unit:\n")]
    assert (len(tables), len(spans)) == ((2, 1) if on else (0, 0))  # the first plan, and the measured one
    if on:
        measured = [[cell.strip() for cell in row[:2]] for row in rows(spans[0])[2:]]
        assert measured == [["0", "2"], ["1", "2"], ["2", "2"]]
