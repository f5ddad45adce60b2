import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.daemon import reread
from ftd.daemon.reread import Span, Unread, digests_of
from ftd.units import MIB
from tests.unit.shm.test_digest import reference

SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), max_size=30)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of 1000 bytes."""
    data = os.urandom(1000)
    (tmp_path / "f").write_bytes(data)
    fd = os.open(tmp_path / "f", os.O_RDWR)
    yield fd, data
    os.close(fd)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=SPANS, threads=st.integers(1, 4))
def test_digests_are_those_of_the_definition(
    file: tuple[int, bytes], places: list[tuple[int, int]], threads: int
) -> None:
    fd, data = file
    told: list[int] = []
    spans = [Span(fd, offset, nbytes) for offset, nbytes in places]
    found = digests_of(spans, threads=threads, step=told.append)
    assert found == [reference(data[offset : offset + nbytes]) for offset, nbytes in places]
    assert sum(told) == sum(nbytes for _, nbytes in places)


def test_pieces_of_a_long_tensor_are_digested_apart(tmp_path: Path) -> None:
    data = os.urandom(MIB) * 33 + b"x"
    (tmp_path / "f").write_bytes(data)
    told: list[int] = []
    with (tmp_path / "f").open("rb") as file:
        found = digests_of([Span(file.fileno(), 5, len(data) - 5)], threads=3, step=told.append)
    assert found == [reference(data[5:])]
    assert told == [16 * MIB, 16 * MIB, MIB - 4]


def test_short_reads_are_continued(file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    fd, data = file
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    assert digests_of([Span(fd, 3, 100)], threads=1, step=lambda _: None) == [reference(data[3:103])]


def test_a_file_that_ends_early_has_no_digest_there(file: tuple[int, bytes]) -> None:
    fd, data = file
    spans = [Span(fd, 0, 1000), Span(fd, 999, 2), Span(fd, 2000, 1), Span(fd, 1000, 0)]
    found = digests_of(spans, threads=2, step=lambda _: None)
    assert found == [reference(data), Unread("ends at byte 1000"), Unread("ends at byte 2000"), reference(b"")]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        found = digests_of([Span(fd, 0, 1)], threads=1, step=lambda _: None)
    finally:
        os.close(fd)
    assert found == [Unread("cannot be read: is a directory")]


def test_whoever_counts_may_end_it(file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first batch: the rest is not read."""
    fd, _ = file
    read: list[int] = []
    real = os.preadv

    def counted(fd: int, buffers: list[memoryview], at: int) -> int:
        read.append(at)
        return real(fd, buffers, at)

    def step(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(reread, "_BATCH_PIECES", 1)
    with pytest.raises(KeyboardInterrupt):
        digests_of([Span(fd, 0, 10)] * 100_000, threads=1, step=step)
    assert len(read) < 100_000


def test_ten_thousand_small_tensors_take_no_noticeable_time(file: tuple[int, bytes]) -> None:
    """Counted, not timed: a thread is handed a thousand of them at once."""
    fd, _ = file
    told: list[int] = []
    digests_of([Span(fd, 0, 10)] * 10_000, threads=2, step=told.append)
    assert len(told) == 10
