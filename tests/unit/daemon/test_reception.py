"""What a publisher hands over, step by step, without a loop and without a process for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ftd.config.model import DaemonConfig
from ftd.daemon import reception as module
from ftd.daemon.build import Generation, LoadCancelledError
from ftd.daemon.progress import LoadProgress
from ftd.daemon.reception import MAX_STAGED_BYTES, SLOT_BYTES, SLOTS, Reception
from ftd.errors import EXIT_MEMORY, FrameError, MemoryShortError, PublishDamagedError, PublishRefusedError
from ftd.shm.digest import PIECE_BYTES
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import Access, Segment, free_bytes, huge_bytes
from ftd.tensorspec import TensorSpec
from ftd.units import MIB
from ftd.wire import frame
from ftd.wire.publish import Begin, Describe, Description, Part, Put, places
from tests.conftest import mode_of

InChild = Callable[..., Any]
A, B = TensorSpec("layers.0.a", "U8", (300,)), TensorSpec("layers.1.b", "I16", (2, 50))
DATA = {A.name: bytes(range(256)) + bytes(44), B.name: b"b" * 200}
WHAT = Description((A, B, TensorSpec("tied", "U8", (300,)), TensorSpec("none", "F32", (0,))), {"tied": A.name})


def left(names: Names) -> list[str]:
    return sorted(path.name.removeprefix(f"ftd.{names.namespace}.") for path in SHM_DIR.glob(f"ftd.{names.namespace}*"))


class Publisher:
    """The other end, as far as it touches the staging segment."""

    def __init__(self, names: Names, nbytes: int = 4096, description: int = 0, **config: Any) -> None:
        self.notes: list[str] = []
        self.progress = LoadProgress()
        self.reception = Reception(
            names,
            1,
            DaemonConfig(receive=True, pin="none", **{"huge_pages": "never", **config}),
            Access(),
            self.progress,
            make_room=lambda: None,
            holders=lambda: "",
            note=self.notes.append,
            publisher="pid 7 (test)",
            told=Begin(nbytes, description),
        )
        self.staging = self.reception.staging
        segment = Segment.open(self.staging.name, writable=True)
        assert segment is not None and segment.inode == self.staging.inode
        self._fd = segment.detach()

    def describe(self, what: Description = WHAT) -> None:
        blob = what.encode()
        os.pwrite(self._fd, blob, 0)
        self.reception.describe(Describe.of(self.staging.token, blob))

    def put(self, *parts: tuple[int, int, bytes], digests: Sequence[bytes] | None = None) -> None:
        """A lane with one put."""
        told = digests or [xxhash.xxh3_128_digest(data) for _, _, data in parts]
        with self.lane() as lane:
            lane.put(*((*part, digest) for part, digest in zip(parts, told, strict=True)))
            lane.put()
            lane.run()

    def lane(self, number: int = 0) -> Lane:
        return Lane(self, number)

    def write(self, data: bytes, at: int) -> None:
        os.pwrite(self._fd, data, at)

    def put_all(self) -> None:
        self.put((0, 0, DATA[A.name]), (1, 0, DATA[B.name]))

    def end(self) -> None:
        os.close(self._fd)
        self.reception.cancel()
        self.reception.abort()


class Lane:
    """The publisher's end of one, which may say all of it before the daemon's end runs."""

    def __init__(self, publisher: Publisher, number: int) -> None:
        self._publisher, self._number, self._turn = publisher, number, 0
        self.ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)

    def put(self, *parts: tuple[int, int, bytes, bytes]) -> None:
        staging = self._publisher.staging
        slot = (self._number * staging.slots + self._turn % staging.slots) * staging.slot_bytes
        self._turn += 1
        for (_, _, data, _), start in zip(parts, places([len(data) for _, _, data, _ in parts]), strict=False):
            self._publisher.write(data, slot + start)
        told = tuple(Part(tensor, offset, len(data), digest) for tensor, offset, data, digest in parts)
        self.ours.sendall(frame.encode(Put(told).to_map()))

    def run(self) -> None:
        """The daemon's end, to its end."""
        self._publisher.reception.fill(self._number, self._theirs)

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._theirs.fileno() == -1, "the daemon's end closes it"
        self.ours.close()


@pytest.fixture
def publisher(names: Names) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def make(nbytes: int = 4096, description: int = 0, **config: Any) -> Publisher:
        made.append(Publisher(names, nbytes, description, **config))
        return made[-1]

    yield make
    for each in made:
        each.end()
    assert left(names) == []


def maps(names: Names) -> list[str]:
    """What this process maps of the namespace, named or not."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"/ftd.{names.namespace}." in line]


def bytes_of(generation: Generation, names: Names) -> dict[str, bytes]:
    found = {}
    for placed in generation.manifest.tensors:
        with open(SHM_DIR / names.weights(1, placed.extent.segment)[1:], "rb") as file:
            found[placed.spec.name] = os.pread(file.fileno(), placed.extent.nbytes, placed.extent.offset)
    return found


# --- the staging segment ------------------------------------------------------------------------------------------


LANE = SLOTS * SLOT_BYTES


@pytest.mark.parametrize(
    ("told", "threads", "free", "lanes", "slots", "slot_bytes"),
    [
        (Begin(0, 0), 1, 1 << 61, 1, 2, 4096),
        (Begin(1, 0), 1, 1 << 61, 1, 2, 4096),
        (Begin(4097, 5000), 1, 1 << 61, 1, 2, 8192),
        (Begin(100, 5000), 1, 1 << 61, 1, 2, 8192),
        (Begin(PIECE_BYTES, 0), 4, 1 << 61, 1, 2, SLOT_BYTES),
        (Begin(PIECE_BYTES + 1, 0), 4, 1 << 61, 2, 2, SLOT_BYTES),
        (Begin(1 << 60, 0), 1, 1 << 61, 1, 2, SLOT_BYTES),
        (Begin(1 << 60, 5 * SLOT_BYTES), 1, 1 << 61, 1, 5, SLOT_BYTES),
        (Begin(1 << 60, 5 * SLOT_BYTES), 2, 1 << 61, 2, 3, SLOT_BYTES),
        (Begin(1 << 60, 0), 64, 1 << 61, MAX_STAGED_BYTES // LANE, 2, SLOT_BYTES),
        (Begin(0, 1 << 60), 1, 1 << 61, 1, MAX_STAGED_BYTES // SLOT_BYTES, SLOT_BYTES),
        (Begin(40 * MIB, 0), 64, 64 * MIB, 3, 2, SLOT_BYTES),  # /dev/shm of a container
        (Begin(40 * MIB, 0), 64, 50 * MIB, 1, 2, SLOT_BYTES),
        (Begin(40 * MIB, 0), 64, 30 * MIB, 1, 2, SLOT_BYTES),
    ],
)
def test_no_more_is_staged_than_there_is_to_hand_over_and_never_more_than_the_bound(
    told: Begin, threads: int, free: int, lanes: int, slots: int, slot_bytes: int
) -> None:
    assert module._shape(told, threads, free) == (lanes, slots, slot_bytes)
    assert lanes * slots * slot_bytes <= MAX_STAGED_BYTES


def test_it_is_closed_to_others_and_has_no_hole(publisher: Callable[..., Publisher], names: Names, umask: None) -> None:
    publisher(5 * MIB)
    path = SHM_DIR / names.staging(1)[1:]
    assert mode_of(path) == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size == SLOTS * SLOT_BYTES


def test_it_has_no_name_once_its_publisher_has_it_open(publisher: Callable[..., Publisher], names: Names) -> None:
    one = publisher()
    assert left(names) == ["g1.staging"]
    one.describe()
    assert left(names) == ["g1.0"]


def test_a_full_tmpfs_is_an_error_and_no_signal(names: Names, in_child: InChild) -> None:
    def begin() -> list[str]:
        with pytest.raises(MemoryShortError, match=r"no room for the 8\.00 MiB by which weights travel \(") as caught:
            Publisher(names, 64 * MIB)
        assert not maps(names), caught
        return left(names)

    assert in_child(begin, shm="size=7m") == []


def test_its_pages_are_huge_where_the_daemon_may_have_such(names: Names, in_child: InChild) -> None:
    def scenario() -> None:
        for setting, expected in (("auto", True), ("never", False)):
            one = Publisher(names, 4 * MIB, huge_pages=setting)
            segment = Segment(names.staging(1), os.dup(one._fd))
            with segment, segment.map_shared(writable=True, huge=True) as mapping:
                mapping[0] = 1
                assert bool(huge_bytes().get(segment.name)) == expected
            one.end()

    in_child(scenario, shm="size=64m,huge=advise")


# --- a publication ------------------------------------------------------------------------------------------------


def test_what_was_handed_over_is_the_generation(publisher: Callable[..., Publisher], names: Names) -> None:
    one = publisher()
    one.describe(Description(WHAT.tensors, WHAT.ties, "t:1", "engine 1", None, {"config.json": b"{}"}))
    one.put_all()
    generation = one.reception.finish()
    assert bytes_of(generation, names) == {**DATA, "tied": DATA[A.name], "none": b""}
    manifest = generation.manifest
    assert manifest.source == {"kind": "published", "path": "engine 1", "files": [], "transform": "t:1"}
    extents = {placed.spec.name: placed.extent for placed in manifest.tensors}
    assert extents["tied"] == extents[A.name]
    assert len(manifest.digests) == 4
    assert manifest.files_inode == (SHM_DIR / names.files(1)[1:]).stat().st_ino
    assert (one.progress.snapshot().bytes_done, one.progress.snapshot().bytes_total) == (500, 500)
    assert left(names) == ["g1.0", "g1.files", "g1.manifest"]
    assert one.notes == []


def test_what_is_given_up_when_it_was_just_made_leaves_nothing(
    publisher: Callable[..., Publisher], names: Names
) -> None:
    one = publisher()
    one.describe()
    one.put_all()
    one.reception.finish()
    one.reception.cancel()
    one.reception.abort()
    assert left(names) == []


@pytest.mark.leaves_segments
def test_what_is_kept_stays(names: Names) -> None:
    one = Publisher(names)
    one.describe()
    one.put_all()
    one.reception.finish()
    assert os.fstat(one._fd).st_blocks
    one.reception.keep()
    assert not os.fstat(one._fd).st_blocks, "it stays with whoever has it open"
    one.end()
    assert left(names) == ["g1.0", "g1.manifest"]


def fingerprint(make: Callable[..., Publisher], what: Description, data: bytes = DATA[A.name]) -> str:
    one = make()
    one.describe(what)
    one.put((0, 0, data), (1, 0, DATA[B.name]))
    told = one.reception.finish().manifest.fingerprint
    one.reception.abort()
    return told


def test_the_fingerprint_is_that_of_weights_transform_files_and_layers(publisher: Callable[..., Publisher]) -> None:
    tensors = (A, B)
    same = [fingerprint(publisher, Description(tensors, {}, "t:1", source)) for source in ("x", "y")]
    others = [
        fingerprint(publisher, Description(tensors, {}, "t:2")),
        fingerprint(publisher, Description(tensors, {}, "t:1"), data=bytes(300)),
        fingerprint(publisher, Description(tensors, {}, "t:1", files={"config.json": b"1"})),
        fingerprint(publisher, Description(tensors, {}, "t:1", files={"config.json": b"2"})),
        fingerprint(publisher, Description(tensors, {}, "t:1", layers=("layers",))),
        fingerprint(publisher, Description((TensorSpec("c", "U8", (300,)), B), {}, "t:1")),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 7


def test_layers_are_the_publishers_else_the_daemons(publisher: Callable[..., Publisher]) -> None:
    for layers, expected in ((None, {"layers"}), (("layers.*",), {"layers.0", "layers.1"})):
        one = publisher(layers=["layers"])
        one.describe(Description((A, B), layers=layers))
        one.put_all()
        assert set(one.reception.finish().manifest.layers) == expected
        one.reception.abort()


# --- what is refused ----------------------------------------------------------------------------------------------


def test_bytes_that_changed_on_the_way_are_refused_with_the_tensors_name(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    wrong = xxhash.xxh3_128_digest(b"something else")
    with pytest.raises(PublishDamagedError, match=r"bytes 0 to 200 of 'layers.1.b' arrived with XXH3-128") as caught:
        one.put((1, 0, DATA[B.name]), digests=[wrong])
    assert wrong.hex() in caught.value.message


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1, b"x" * 299)],  # no begin of a piece
        [(0, 0, b"x" * 301)],  # more than the piece
        [(0, 0, b"x" * 299)],  # less, with a digest
        [(4, 0, b"x")],  # no such tensor
        [(2, 0, b"x" * 300)],  # a tie
        [(3, 0, b"x")],  # without bytes
        [(0, 0, DATA[A.name]), (0, 0, DATA[A.name])],  # twice
    ],
)
def test_what_is_no_piece_of_what_was_described_is_refused(
    publisher: Callable[..., Publisher], parts: list[tuple[int, int, bytes]]
) -> None:
    one = publisher()
    one.describe()
    with pytest.raises(FrameError, match=r"expected (the begin of a piece that is not here yet|the next of its piece)"):
        one.put(*parts)


BIG = TensorSpec("big", "U8", (PIECE_BYTES + 100,))
NO_DIGEST = b""


def big_bytes() -> bytes:
    return os.urandom(BIG.nbytes)


def cut_up(data: bytes) -> Iterator[list[tuple[int, int, bytes, bytes]]]:
    """Puts for all of `BIG`, whose parts end where slots end."""
    for begin in range(0, len(data), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(data))
        for at in range(begin, end, SLOT_BYTES):
            stop = min(at + SLOT_BYTES, end)
            yield [(0, at, data[at:stop], xxhash.xxh3_128_digest(data[begin:end]) if stop == end else NO_DIGEST)]


def test_a_piece_travels_through_the_slots_of_a_lane_in_turn(
    publisher: Callable[..., Publisher], names: Names, free_slots: Callable[[socket.socket], None]
) -> None:
    one, data = publisher(BIG.nbytes), big_bytes()
    one.describe(Description((BIG,)))
    with one.lane(1) as lane:
        daemon = threading.Thread(target=lane.run)
        daemon.start()
        for parts in cut_up(data):
            free_slots(lane.ours)
            lane.put(*parts)
        lane.put()
        daemon.join()
    generation = one.reception.finish()
    assert bytes_of(generation, names) == {BIG.name: data}


def test_more_small_parts_than_one_request_takes_arrive_each_at_its_place(
    publisher: Callable[..., Publisher], names: Names
) -> None:
    data = {f"t{i}": os.urandom(1 + i % 130) for i in range(1100)}
    one = publisher(1 * MIB)
    one.describe(Description(tuple(TensorSpec(name, "U8", (len(some),)) for name, some in data.items())))
    one.put(*((i, 0, some) for i, some in enumerate(data.values())))
    assert bytes_of(one.reception.finish(), names) == data


@pytest.fixture
def free_slots() -> Callable[[socket.socket], None]:
    def wait(ours: socket.socket) -> None:
        ours.settimeout(20)
        assert ours.recv(1) == b"\1"

    return wait


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0, 4096, b"y" * 4096, NO_DIGEST)], "expected the next of its piece"),  # left out: the bytes between
        ([(0, 0, b"x" * 4096, NO_DIGEST)], "expected the next of its piece"),  # again
        ([(1, 0, b"y" * 300, bytes(16))], "expected the next of its piece"),  # another tensor meanwhile
        ([(0, 64, b"y" * 64, bytes(16))], "expected the next of its piece"),  # a digest, and it is not whole
        (
            [(0, 64, b"y" * (PIECE_BYTES - 64), NO_DIGEST)],
            "a put of 16777152 bytes: expected at most 4194304",
        ),  # beyond the slot
        ([], "a lane that ends inside a piece of 'big'"),
    ],
)
def test_parts_that_make_no_piece_are_refused(
    publisher: Callable[..., Publisher], parts: list[tuple[int, int, bytes, bytes]], words: str
) -> None:
    one = publisher(BIG.nbytes)
    one.describe(Description((BIG, A)))
    with one.lane() as lane:
        lane.put((0, 0, b"x" * 64, NO_DIGEST))
        lane.put(*parts)
        with pytest.raises(FrameError, match=words):
            lane.run()


def test_an_end_without_a_digest_is_refused(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    with one.lane() as lane:
        lane.put((1, 0, DATA[B.name], NO_DIGEST))
        with pytest.raises(FrameError, match="expected the next of its piece"):
            lane.run()


def test_what_is_written_to_a_slot_while_it_is_copied_is_found(
    publisher: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what arrived: not of what lay in the slot when it was told, or lies there afterwards."""
    one = publisher()
    one.describe()

    def late(fd: int, buffers: Sequence[memoryview], at: int) -> int | None:
        honest = os.pread(fd, 1, at)
        os.pwrite(fd, b"!", at)
        end = fetch(fd, buffers, at)
        os.pwrite(fd, honest, at)
        return end

    fetch = module.fetch
    monkeypatch.setattr(module, "fetch", late)
    with pytest.raises(PublishDamagedError, match=r"bytes 0 to 200 of 'layers.1.b' arrived"):
        one.put((1, 0, DATA[B.name]))


def test_a_lane_that_its_publisher_leaves_is_its_end(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    with one.lane() as lane:
        lane.put((0, 0, DATA[A.name], xxhash.xxh3_128_digest(DATA[A.name])))
        lane.ours.close()
        with pytest.raises(PublishRefusedError, match="its publisher ended"):
            lane.run()


def test_a_lane_that_waits_ends_when_it_is_given_up(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    ended = []

    def run() -> None:
        with pytest.raises(LoadCancelledError):
            lane.run()
        ended.append(True)

    with one.lane() as lane:
        daemon = threading.Thread(target=run)
        daemon.start()
        assert lane.ours.recv(1) == b"\1"
        one.reception.cancel()
        daemon.join(20)
        assert ended


def test_a_tensor_that_is_not_whole_is_not_published(publisher: Callable[..., Publisher], names: Names) -> None:
    one = publisher()
    one.describe()
    one.put((1, 0, DATA[B.name]))
    with pytest.raises(FrameError, match=r"1 tensors are not whole, 'layers.0.a' is one"):
        one.reception.finish()


def test_a_description_that_changed_on_the_way_is_refused(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    with pytest.raises(FrameError, match="whose digest differs"):
        one.reception.describe(Describe.of(one.staging.token, WHAT.encode()))


@pytest.mark.parametrize("nbytes", [0, 5000, 1 << 60])
def test_a_description_longer_than_what_is_staged_is_refused(publisher: Callable[..., Publisher], nbytes: int) -> None:
    with pytest.raises(FrameError):
        one = publisher()
        one.reception.describe(Describe(one.staging.token, nbytes, bytes(16)))


def test_layers_that_are_no_patterns_are_refused(publisher: Callable[..., Publisher]) -> None:
    with pytest.raises(FrameError, match=r"layers: pattern 'a\[\]'"):
        publisher().describe(Description((A,), layers=("a[]",)))


def test_too_little_memory_is_refused_with_needed_and_free_and_leaves_nothing(
    publisher: Callable[..., Publisher], names: Names
) -> None:
    one = publisher(memory_budget=1 * MIB)
    with pytest.raises(MemoryShortError, match=r"need 3\d+ bytes.*memory_budget has 1048576 free") as caught:
        one.describe(Description((TensorSpec("big", "U8", (2 * MIB,)),)))
    assert caught.value.exit_status == EXIT_MEMORY
    assert left(names) == []


def test_a_tmpfs_that_fills_up_meanwhile_is_an_error_and_no_signal(names: Names, in_child: InChild) -> None:
    def scenario() -> list[str]:
        somebody = SHM_DIR / "somebody"
        free = free_bytes()
        one = Publisher(names, 4 * MIB)
        one.describe(Description((TensorSpec("big", "U8", (4 * MIB,)),)))
        with open(somebody, "wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(64 * 1024))
        os.truncate(somebody, somebody.stat().st_size - 1 * MIB)
        with pytest.raises(MemoryShortError, match="ran full while the weights were read") as caught:
            one.put((0, 0, bytes(4 * MIB)))
        one.end()
        somebody.unlink()
        assert free_bytes() == free
        assert not maps(names), caught
        return left(names)

    assert in_child(scenario, shm="size=16m") == []


def test_what_was_given_up_is_mapped_no_more_while_its_error_lives(
    publisher: Callable[..., Publisher], names: Names
) -> None:
    """The frames of an error hold what they saw until they are collected: pages too, if they were not given back."""
    one = publisher()
    one.describe()
    with pytest.raises(PublishDamagedError) as caught:
        one.put((0, 0, DATA[A.name]), digests=[bytes(16)])
    assert maps(names)
    one.reception.abort()
    assert not maps(names), caught


def test_a_staging_segment_that_is_cut_short_is_an_error_and_no_signal(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    with one.lane() as lane:
        lane.put((0, 0, DATA[A.name], bytes(16)))
        os.ftruncate(one._fd, 0)
        with pytest.raises(PublishDamagedError, match="cut short"):
            lane.run()


def test_what_was_given_up_copies_no_more(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    one.describe()
    one.reception.cancel()
    with pytest.raises(LoadCancelledError):
        one.put_all()


def test_verify_full_reads_memory_once_more(
    publisher: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(module, "prove_memory", lambda *arguments: asked.append(arguments[2]))
    for verify in ("fingerprint", "none", "full"):
        one = publisher(verify=verify)
        one.describe()
        one.put_all()
        digests = one.reception.finish().manifest.digests
        assert len(digests) == 4
        assert asked == ([digests] if verify == "full" else [])
        one.reception.abort()
