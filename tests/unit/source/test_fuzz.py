"""Fuzzers of all that reads untrusted bytes here: random damage by hypothesis, and guided by coverage with atheris."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import targets

ROOT = Path(__file__).parents[3]
SEEDS = {name: list(seeds()) for name, (seeds, _) in targets.TARGETS.items()}


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A seed, cut, overwritten in places, or with a part of another one in it."""
    raw = bytearray(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        other = draw(st.sampled_from(SEEDS[name]))
        begin = draw(st.integers(0, len(other)))
        piece = draw(st.binary(max_size=4) | st.just(other[begin : begin + draw(st.integers(0, 40))]))
        raw[at : at + draw(st.integers(0, 8))] = piece
    return bytes(raw[: draw(st.integers(0, len(raw)) | st.just(len(raw)))])


@pytest.mark.parametrize("name", targets.TARGETS)
def test_seeds_are_read(name: str) -> None:
    for seed in SEEDS[name]:
        targets.TARGETS[name][1](seed)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_damage_ends_in_words_or_in_tensors_inside_the_file(name: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(damaged(name))
    def check(data: bytes) -> None:
        targets.TARGETS[name][1](data)

    check()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
@pytest.mark.parametrize("name", targets.TARGETS)
def test_ten_thousand_inputs_guided_by_coverage(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, tmp_path / "corpus", "-runs=10000", "-seed=1"]
    ended = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and "Done 10000 runs" in ended.stderr, ended.stderr[-4000:]
