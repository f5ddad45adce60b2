"""Which pages of a private mapping were written to, by the kernel's own account."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.shm.segment import Access, Segment
from ftd_client import written as module
from ftd_client.views import Mapped
from ftd_client.written import touches, written

PAGE = mmap.PAGESIZE
PAGES = 64


@pytest.fixture(params=["shm", "file"])
def segment(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Segment]:
    if request.param == "file":
        path = tmp_path / "weights"
        path.write_bytes(os.urandom(PAGES * PAGE))
        with Segment("/none", os.open(path, os.O_RDONLY)) as made:
            yield made
        return
    with Segment.create(f"/ftdw.{uuid.uuid4().hex}", PAGES * PAGE, Access()) as made:
        made.write(os.urandom(PAGES * PAGE))
        yield made
        made.unlink()


@pytest.fixture(params=["scanned", "read"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to ask the kernel; before 6.7 they are one."""
    if request.param == "read":
        monkeypatch.setattr(module, "_SCAN", 0)
    return str(request.param)


@pytest.fixture
def mapping(segment: Segment) -> mmap.mmap:
    return segment.map_private()


def _pages(mapping: mmap.mmap, first: int = 0, count: int = PAGES) -> list[int]:
    """Numbers of the written pages, from the ranges."""
    address = Mapped(mapping).address
    ranges = written(address + first * PAGE, count * PAGE)
    assert all(start % PAGE == 0 == stop % PAGE and start < stop for start, stop in ranges)
    assert all(one[1] < two[0] for one, two in pairwise(ranges)), "they could be merged"
    return [page for start, stop in ranges for page in range((start - address) // PAGE, (stop - address) // PAGE)]


def _tensor(mapping: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(mapping, dtype=torch.int32)


def test_what_was_never_touched_or_only_read_is_not_written(mapping: mmap.mmap) -> None:
    assert _pages(mapping) == []
    assert _tensor(mapping).sum() is not None
    assert bytes(mapping)
    assert _pages(mapping) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda each: each.add_(1),
        lambda each: each.data.add_(1),
        lambda each: each.numpy().__setitem__(slice(None), 7),
        lambda each: each.copy_(each.clone()),  # what was there before
        lambda each: torch.nn.Parameter(each, requires_grad=False).data.zero_(),
    ],
    ids=["in place", "data", "numpy", "same bytes", "parameter"],
)
def test_every_write_is_found_on_exactly_its_pages(mapping: mmap.mmap, write: Callable[[torch.Tensor], Any]) -> None:
    tensor, each = _tensor(mapping), PAGE // 4
    tensor.sum()
    write(tensor[3 * each : 3 * each + 1])
    write(tensor[7 * each - 1 : 9 * each + 1])
    assert _pages(mapping) == [3, 6, 7, 8, 9]
    assert _pages(mapping, 4, 4) == [6, 7]
    write(tensor[-1:])
    assert _pages(mapping) == [3, 6, 7, 8, 9, PAGES - 1]


def test_another_mapping_of_the_same_pages_is_not_meant(segment: Segment) -> None:
    one, other = segment.map_private(), segment.map_private()
    one[0] = 1
    assert (_pages(one), _pages(other)) == ([0], [])


def test_the_segments_own_pages_count_as_unwritten_when_others_write_them() -> None:
    with Segment.create(f"/ftdw.{uuid.uuid4().hex}", PAGES * PAGE, Access()) as made:
        made.unlink()
        shared, private = made.map_shared(writable=True), made.map_private()
        shared[5 * PAGE] = 1
        assert private[5 * PAGE] == 1
        assert _pages(private) == []


def test_runs_go_on_over_reads(mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", 8 * 5)
    monkeypatch.setattr(module, "_REGIONS", 1)
    for page in [*range(3, 22), 24, 25, 30]:
        mapping[page * PAGE] = 1
    assert _pages(mapping) == [*range(3, 22), 24, 25, 30]


def test_a_part_of_a_page_is_that_page(mapping: mmap.mmap) -> None:
    address = Mapped(mapping).address
    mapping[2 * PAGE] = 1
    assert written(address + 3 * PAGE - 1, 1) == [(address + 2 * PAGE, address + 3 * PAGE)]
    assert written(address + 3 * PAGE, 1) == []
    assert written(address, 0) == []


def test_where_the_kernel_does_not_tell_all_counts(
    mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAGEMAP", "/proc/self/no-pagemap")
    with caplog.at_level(logging.WARNING):
        assert _pages(mapping) == list(range(PAGES))
    assert [record.getMessage() for record in caplog.records] == [
        "/proc/self/no-pagemap cannot be read (no such file or directory): all weights count as changed in this process"
    ]
    monkeypatch.setattr(module, "_PAGEMAP", "/dev/null")
    assert _pages(mapping) == list(range(PAGES))


def test_a_refused_read_counts_all(mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> int:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "preadv", refused)
    monkeypatch.setattr(module.fcntl, "ioctl", refused)
    assert _pages(mapping) == list(range(PAGES))


def test_states_that_are_a_copy_of_ones_own() -> None:
    """present or swapped, and no page of a file; a migrating page of a file is swapped and of a file."""
    assert [top for top in (0x00, 0x20, 0x40, 0x60, 0x80, 0xA0, 0x81, 0xA1, 0x01) if module._WRITTEN[top]] == [
        0x40,
        0x80,
        0x81,
    ]


@given(
    edges=st.lists(st.integers(0, 60), max_size=12, unique=True).map(sorted),
    address=st.integers(0, 64),
    nbytes=st.integers(0, 20),
)
def test_touches_is_an_overlap(edges: list[int], address: int, nbytes: int) -> None:
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    touched = set(range(address, address + nbytes)) & {byte for start, stop in ranges for byte in range(start, stop)}
    assert touches(ranges, address, nbytes) == bool(touched)
