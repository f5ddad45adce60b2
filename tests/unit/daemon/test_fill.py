import dataclasses
import functools
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.daemon import fill
from ftd.daemon.fill import Filler, Read, pad, plan_reads
from ftd.errors import MemoryShortError, SourceChangedError, SourceError
from ftd.shm.digest import STRIDE_BYTES, PieceDigests, cut, strides
from ftd.shm.layout import Extent, Layout, lay_out
from ftd.shm.names import Names
from ftd.shm.segment import PAGE_BYTES, Access, Segment
from ftd.source.base import SourceFile, StoredTensor
from ftd.tensorspec import TensorSpec
from ftd.units import MIB
from tests.unit.shm.test_digest import reference

InChild = Callable[..., Any]

# --- which bytes are read by which request -----------------------------------------------------------------------

#: (file, unused bytes before it, bytes) of each tensor, in the order in which they lie in their files.
CHECKPOINTS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 7]), st.integers(0, 200)), max_size=25)


def _stored(rows: list[tuple[int, int, int]]) -> list[StoredTensor]:
    ends = [0, 0, 0]
    tensors = []
    for number, (file, skipped, nbytes) in enumerate(rows):
        offset = ends[file] + skipped
        ends[file] = offset + nbytes
        tensors.append(StoredTensor(TensorSpec(f"{number % 4}.{number}", "U8", (nbytes,)), file, offset))
    return tensors


def _laid_out(tensors: Sequence[StoredTensor], segment_bytes: int = 1500) -> tuple[Layout, dict[str, Extent]]:
    layout = lay_out(
        [tensor.spec for tensor in tensors],
        lambda name: name.partition(".")[0],
        page_bytes=PAGE_BYTES,
        segment_bytes=segment_bytes,
    )
    return layout, {placed.spec.name: placed.extent for placed in layout.tensors}


@given(CHECKPOINTS, st.integers(1, 300), st.randoms())
def test_every_byte_of_every_tensor_is_read_once_into_its_place(
    rows: list[tuple[int, int, int]], request_bytes: int, random: Any
) -> None:
    tensors = _stored(rows)
    _, extents = _laid_out(tensors)
    expected = {}
    for tensor in tensors:
        extent = extents[tensor.spec.name]
        for k in range(extent.nbytes):
            expected[extent.segment, extent.offset + k] = (tensor.file, tensor.offset + k)
    random.shuffle(tensors)
    found = {}
    for read in plan_reads(tensors, extents, request_bytes):
        at = read.offset
        for piece in read.pieces:
            for k in range(piece.nbytes):
                assert (piece.segment, piece.offset + k) not in found
                found[piece.segment, piece.offset + k] = (read.file, at + k)
            at += piece.nbytes
        assert at - read.offset == read.nbytes
    assert found == expected


@given(CHECKPOINTS, st.integers(1, 300))
def test_requests_are_bounded_in_file_order_and_as_long_as_they_may_be(
    rows: list[tuple[int, int, int]], piece_bytes: int
) -> None:
    tensors = _stored(rows)
    reads = plan_reads(tensors, _laid_out(tensors)[1], piece_bytes)
    assert all(0 < read.nbytes <= piece_bytes and all(piece.nbytes for piece in read.pieces) for read in reads)
    for before, after in pairwise(reads):
        end = before.offset + before.nbytes
        assert (before.file, end) <= (after.file, after.offset)
        if (before.file, end) == (after.file, after.offset):
            assert before.nbytes + after.pieces[0].nbytes > piece_bytes


@given(CHECKPOINTS, st.integers(1, 300))
def test_no_piece_of_a_tensor_is_cut(rows: list[tuple[int, int, int]], piece_bytes: int) -> None:
    """A thread digests what it read, and needs nothing of another's."""
    tensors = _stored(rows)
    _, extents = _laid_out(tensors)
    pieces = [piece for read in plan_reads(tensors, extents, piece_bytes) for piece in read.pieces]
    assert {(piece.segment, piece.offset, piece.nbytes) for piece in pieces} == {
        (extent.segment, *place)
        for extent in extents.values()
        for place in cut(extent.offset, extent.nbytes, piece_bytes)
    }


def test_tensors_that_adjoin_share_a_request_wherever_they_go() -> None:
    tensors = _stored([(0, 0, 100), (0, 0, 50), (0, 0, 0), (0, 0, 60), (0, 8, 10)])
    extents = {
        "0.0": Extent(1, 0, 100),
        "1.1": Extent(0, 512, 50),
        "2.2": Extent(0, 0, 0),
        "3.3": Extent(0, 0, 60),
        "0.4": Extent(2, 0, 10),
    }
    assert plan_reads(tensors, extents) == [
        Read(0, 0, (Extent(1, 0, 100), Extent(0, 512, 50), Extent(0, 0, 60))),
        Read(0, 218, (Extent(2, 0, 10),)),
    ]


def test_one_request_scatters_no_further_than_the_kernel_takes() -> None:
    tensors = _stored([(0, 0, 1)] * 2500)
    reads = plan_reads(tensors, _laid_out(tensors)[1])
    assert [len(read.pieces) for read in reads] == [1024, 1024, 452]


def test_a_long_tensor_is_cut() -> None:
    tensors = _stored([(0, 5, 100)])
    assert plan_reads(tensors, {"0.0": Extent(0, 512, 100)}, 40) == [
        Read(0, 5, (Extent(0, 512, 40),)),
        Read(0, 45, (Extent(0, 552, 40),)),
        Read(0, 85, (Extent(0, 592, 20),)),
    ]


def test_nothing_is_read_for_nothing() -> None:
    assert plan_reads([], {}) == []
    assert plan_reads(_stored([(0, 0, 0)]), {"0.0": Extent(0, 0, 0)}) == []


# --- reading -----------------------------------------------------------------------------------------------------


def _file(path: Path, data: bytes | None = None) -> SourceFile:
    """A file as its header's reader would have seen it now."""
    if data is not None:
        path.write_bytes(data)
    facts = path.stat()
    return SourceFile(path, path.name, facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_dev, "")


class Loading:
    """One load of a checkpoint's files into plain memory, with everything that may happen meanwhile."""

    def __init__(self, files: list[SourceFile], tensors: list[StoredTensor], request_bytes: int = 64) -> None:
        self.layout, self.extents = _laid_out(tensors)
        self.files, self.tensors = files, tensors
        self.reads = plan_reads(tensors, self.extents, request_bytes)
        self.mappings = [mmap.mmap(-1, size) for size in self.layout.segments]
        self.digests = PieceDigests(request_bytes)
        self.told: list[int] = []

    def run(
        self, threads: int = 3, cancelled: Callable[[], bool] = lambda: False, done: Callable[[int], None] | None = None
    ) -> None:
        views = [memoryview(mapping) for mapping in self.mappings]
        try:
            with _no_fd_is_left():
                Filler(
                    self.files,
                    views,
                    threads=threads,
                    cancelled=cancelled,
                    done=done or self.told.append,
                    digests=self.digests,
                ).run(self.reads)
        finally:
            for view in views:
                view.release()

    def bytes_of(self, tensor: StoredTensor) -> bytes:
        extent = self.extents[tensor.spec.name]
        return self.mappings[extent.segment][extent.offset : extent.offset + extent.nbytes] if extent.nbytes else b""

    def digest_of(self, tensor: StoredTensor) -> bytes:
        """As it was computed while reading, and from nothing else."""
        extent = self.extents[tensor.spec.name]
        return self.digests.of(extent, memoryview(bytes(extent.offset + extent.nbytes)))


@contextmanager
def _no_fd_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    try:
        yield
    finally:
        assert set(os.listdir("/proc/self/fd")) <= before


def _one_file(tmp_path: Path, nbytes: int = 1000, request_bytes: int = 64) -> tuple[Loading, bytes]:
    data = os.urandom(nbytes)
    return Loading([_file(tmp_path / "f", data)], _stored([(0, 0, nbytes)]), request_bytes), data


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=CHECKPOINTS, threads=st.integers(1, 4), request_bytes=st.integers(1, 300))
def test_the_memory_holds_what_the_files_hold(
    tmp_path: Path, rows: list[tuple[int, int, int]], threads: int, request_bytes: int
) -> None:
    contents = [os.urandom(6000) for _ in range(3)]
    files = [_file(tmp_path / str(number), data) for number, data in enumerate(contents)]
    load = Loading(files, _stored(rows), request_bytes)
    load.run(threads)
    for tensor in load.tensors:
        stored = contents[tensor.file][tensor.offset : tensor.offset + tensor.spec.nbytes]
        assert load.bytes_of(tensor) == stored
        assert load.digest_of(tensor) == reference(stored, request_bytes)
    for gap in load.layout.gaps():
        assert not any(load.mappings[gap.segment][gap.offset : gap.offset + gap.nbytes])
    assert sum(load.told) == sum(tensor.spec.nbytes for tensor in load.tensors)
    assert len(load.told) == len(load.reads)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may give less than was asked for: also the middle of one of several buffers."""
    real = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:7]] if len(buffers[0]) > 7 else buffers[:2], offset)

    data = os.urandom(500)
    load = Loading([_file(tmp_path / "f", data)], _stored([(0, 0, 3), (0, 0, 7), (0, 0, 100), (0, 0, 390)]), 1000)
    assert len(load.reads) == 1
    monkeypatch.setattr(os, "preadv", short)
    load.run(threads=1)
    assert b"".join(map(load.bytes_of, load.tensors)) == data
    assert [load.digest_of(t) for t in load.tensors] == [reference(load.bytes_of(t), 1000) for t in load.tensors]


@pytest.mark.parametrize("stride_bytes", [1, 7, 64, 333, 10_000])
def test_strides_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride_bytes: int) -> None:
    asked: list[int] = []
    real = os.preadv

    def told(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(map(len, buffers)))
        return real(fd, buffers, offset)

    data = os.urandom(500)
    load = Loading([_file(tmp_path / "f", data)], _stored([(0, 0, 3), (0, 0, 7), (0, 0, 100), (0, 0, 390)]), 130)
    monkeypatch.setattr(fill, "strides", functools.partial(strides, stride_bytes=stride_bytes))
    monkeypatch.setattr(os, "preadv", told)
    load.run(threads=1)
    assert max(asked) <= stride_bytes
    assert b"".join(map(load.bytes_of, load.tensors)) == data
    assert [load.digest_of(t) for t in load.tensors] == [reference(load.bytes_of(t), 130) for t in load.tensors]


def test_who_wants_no_digests_gets_the_bytes(tmp_path: Path) -> None:
    data = os.urandom(100)
    view = memoryview(bytearray(100))
    filler = Filler([_file(tmp_path / "f", data)], [view], threads=1, cancelled=lambda: False, done=lambda _: None)
    filler.run([Read(0, 0, (Extent(0, 0, 100),))])
    assert bytes(view) == data


def test_a_file_that_changed_before_is_refused_unread(tmp_path: Path) -> None:
    load, data = _one_file(tmp_path)
    (tmp_path / "f").write_bytes(data + b"x")
    with pytest.raises(SourceChangedError, match="changed while it was read: bytes 1000 is now 1001"):
        load.run()
    assert load.told == []


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    load, data = _one_file(tmp_path)
    os.rename(tmp_path / "f", tmp_path / "old")
    (tmp_path / "f").write_bytes(data)
    os.utime(tmp_path / "f", ns=(0, load.files[0].mtime_ns))
    with pytest.raises(SourceChangedError, match=r"changed while it was read: inode \d+ is now \d+"):
        load.run()


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    load, _ = _one_file(tmp_path)
    (tmp_path / "f").unlink()
    os.mkfifo(tmp_path / "f")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(load.run)
        try:
            error = run.exception(timeout=30)
        finally:  # whoever waits for a writer gets one
            os.close(os.open(tmp_path / "f", os.O_RDWR))
    assert isinstance(error, SourceChangedError) and "bytes 1000 is now 0" in error.message


def test_a_file_that_changes_meanwhile_is_refused_after_all(tmp_path: Path) -> None:
    load, _ = _one_file(tmp_path)
    with pytest.raises(SourceChangedError, match="changed while it was read: mtime_ns"):
        load.run(done=lambda _: os.utime(tmp_path / "f", ns=(0, 1)))


def test_a_file_that_is_cut_short_meanwhile_says_where(tmp_path: Path) -> None:
    load, _ = _one_file(tmp_path)
    with pytest.raises(SourceChangedError, match="f ended at byte 100 while it was read: expected 1000 bytes"):
        load.run(threads=1, done=lambda _: os.truncate(tmp_path / "f", 100))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, gone: int) -> None:
    files = [_file(tmp_path / name, b"x" * 10) for name in ("a", "b")]
    load = Loading(files, _stored([(0, 0, 10), (1, 0, 10)]))
    files[gone].path.unlink()
    with pytest.raises(SourceError, match=f"{files[gone].path} cannot be opened: no such file or directory"):
        load.run()


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    load = Loading([_file(tmp_path)], _stored([(0, 0, 10)]))
    with pytest.raises(SourceError, match=f"{tmp_path} cannot be read: is a directory"):
        load.run()


def test_asked_to_end_it_stops_between_requests(tmp_path: Path) -> None:
    load, data = _one_file(tmp_path)
    load.run(threads=1, cancelled=lambda: len(load.told) == 3)
    assert load.told == [64, 64, 64]
    assert load.mappings[0][:1000] == data[:192] + bytes(808)


def test_asked_to_end_before_it_starts_it_reads_nothing(tmp_path: Path) -> None:
    load, _ = _one_file(tmp_path)
    load.run(cancelled=lambda: True)
    assert load.told == []


def test_the_first_error_stops_the_other_threads(tmp_path: Path) -> None:
    load, _ = _one_file(tmp_path, nbytes=6400)
    assert len(load.reads) == 100
    numbers = itertools.count(1)
    calls: list[int] = []

    def done(_: int) -> None:
        number = next(numbers)
        calls.append(number)
        if number == 1:
            raise MemoryShortError("first")
        # every other thread goes on only when the error is known; then it must find that it should stop
        assert filler._failed.wait(10)

    views = [memoryview(mapping) for mapping in load.mappings]
    filler = Filler(load.files, views, threads=4, cancelled=lambda: False, done=done)
    with pytest.raises(MemoryShortError, match="first"):
        filler.run(load.reads)
    assert 1 <= len(calls) <= 4


def test_a_mount_that_runs_full_is_an_error_and_no_crash(names: Names, tmp_path: Path, in_child: InChild) -> None:
    """The kernel touches the pages: preadv gives EFAULT where a store would be a SIGBUS."""
    file = _file(tmp_path / "f", os.urandom(4 * MIB))
    tensors = _stored([(0, 0, 4 * MIB)])

    def load() -> None:
        with Segment.create(names.weights(1, 0), 4 * MIB, Access()) as segment:
            view = memoryview(segment.map_shared(writable=True))
        filler = Filler([file], [view], threads=2, cancelled=lambda: False, done=lambda _: None)
        filler.run(plan_reads(tensors, {"0.0": Extent(0, 0, 4 * MIB)}, MIB // 2))

    with pytest.raises(
        MemoryShortError, match=r"/dev/shm ran full while the weights were read into it \(0 B free of 2"
    ):
        in_child(load, shm="size=2m")


def test_a_gathered_tensor_on_a_mount_that_runs_full(names: Names, tmp_path: Path, in_child: InChild) -> None:
    """TL-06: what Python copies to its place has been touched by the kernel before."""
    file = _file(tmp_path / "f", os.urandom(4 * MIB))
    tensor = StoredTensor(TensorSpec("a", "F32", (1024, 1024)), 0, 0, (1, 1024))

    def load() -> None:
        with Segment.create(names.weights(1, 0), 4 * MIB, Access()) as segment:
            view = memoryview(segment.map_shared(writable=True))
        filler = Filler([file], [view], threads=1, cancelled=lambda: False, done=lambda _: None)
        filler.run(plan_reads([tensor], {"a": Extent(0, 0, 4 * MIB)}))

    with pytest.raises(MemoryShortError, match="ran full while the weights were read into it"):
        in_child(load, shm="size=2m")


def test_gathering_stops_when_asked_and_notices_a_file_that_ends(tmp_path: Path) -> None:
    side = 3 * 1024
    file = _file(tmp_path / "f", bytes(side * side * 4))
    tensor = StoredTensor(TensorSpec("a", "F32", (side, side)), 0, 0, (1, side))
    view = memoryview(bytearray(side * side * 4))
    reads = plan_reads([tensor], {"a": Extent(0, 0, side * side * 4)})
    answers = iter([False, False, True, True])
    asked: list[int] = []
    Filler([file], [view], threads=1, cancelled=lambda: next(answers), done=asked.append).run(reads)
    assert next(answers, None) is None and asked == [tensor.spec.nbytes]
    os.truncate(tmp_path / "f", 100)
    cut = dataclasses.replace(file, bytes=100, mtime_ns=(tmp_path / "f").stat().st_mtime_ns)
    with pytest.raises(SourceChangedError, match="ended at byte 100 while it was read"):
        Filler([cut], [view], threads=1, cancelled=lambda: False, done=asked.append).run(reads)


def test_many_small_tensors_are_read_in_few_large_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-23: a disk that answers late is asked once for each stride, in order, and not once for each tensor or page."""
    asked: list[tuple[int, int]] = []
    real = os.preadv

    def told(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, sum(map(len, buffers))))
        return real(fd, buffers, offset)

    load = Loading([_file(tmp_path / "f", os.urandom(8 * MIB))], _stored([(0, 0, 16 << 10)] * 512), 16 * MIB)
    monkeypatch.setattr(os, "preadv", told)
    load.run(threads=1)
    assert asked == [(0, STRIDE_BYTES), (STRIDE_BYTES, 8 * MIB - STRIDE_BYTES)]


# --- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.leaves_segments
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([0, 1, 511, 512, 513, 4095, 4096, 4097, 20_000]), min_size=1, max_size=12),
    page_bytes=st.sampled_from([PAGE_BYTES, 2 * MIB]),
)
def test_padding_leaves_no_hole_and_touches_no_tensor(names: Names, lengths: list[int], page_bytes: int) -> None:
    specs = [TensorSpec(str(number), "U8", (nbytes,)) for number, nbytes in enumerate(lengths)]
    layout = lay_out(specs, lambda _: "", page_bytes=page_bytes)
    if not layout.segments:
        return
    with Segment.create(names.weights(1, 0), layout.segments[0], Access()) as segment:
        expected = bytearray(segment.size)
        for placed in layout.tensors:
            extent = placed.extent
            expected[extent.offset : extent.offset + extent.nbytes] = b"t" * extent.nbytes
            os.pwrite(segment.fileno(), b"t" * extent.nbytes, extent.offset)
        pad(segment.fileno(), layout.gaps())
        assert not segment.has_hole()
        assert segment.size == layout.segments[0]
        assert os.pread(segment.fileno(), segment.size, 0) == bytes(expected)
        segment.unlink()


@pytest.mark.parametrize(
    ("gap", "written"),
    [
        (Extent(0, 100, 412), []),  # inside a page that a tensor touched
        (Extent(0, 4096 + 512, 4096 - 512), []),
        (Extent(0, 4095, 1), []),
        (Extent(0, 4096, 4096), [(4096, 4096)]),
        (Extent(0, 4096 + 512, 4096), [(4096 + 512, 4096)]),
        (Extent(0, 8192, 2 * MIB + 5), [(8192, MIB), (8192 + MIB, MIB), (8192 + 2 * MIB, 5)]),
    ],
)
def test_only_pages_that_nothing_touched_are_written(
    gap: Extent, written: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    def pwrite(fd: int, data: bytes, at: int) -> int:
        assert not any(data)
        calls.append((at, len(data)))
        return len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    pad(-1, [gap])
    assert calls == written


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [8192]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        assert at == ends[-1]
        ends.append(at + min(len(data), 3000))
        return ends[-1] - at

    monkeypatch.setattr(os, "pwrite", pwrite)
    pad(-1, [Extent(0, 8192, 10_000)])
    assert ends[-1] == 18_192


def test_a_mount_that_runs_full_in_the_padding_is_an_error(names: Names, in_child: InChild) -> None:
    def run_full() -> None:
        with Segment.create(names.weights(1, 0), 2 * MIB, Access()) as segment:
            pad(segment.fileno(), [Extent(0, 0, 2 * MIB)])

    with pytest.raises(
        MemoryShortError, match=r"ran full while the padding was written: no space left on device \(0 B free"
    ):
        in_child(run_full, shm="size=1m")
