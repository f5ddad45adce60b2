"""What a publisher hands over, step by step, without a loop and without a process for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ftd.config.model import DaemonConfig
from ftd.daemon import reception as module
from ftd.daemon.build import Generation, LoadCancelledError
from ftd.daemon.progress import LoadProgress
from ftd.daemon.reception import MAX_SLOTS, Reception
from ftd.errors import EXIT_MEMORY, FrameError, MemoryShortError, PublishDamagedError
from ftd.shm.digest import PIECE_BYTES
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import Access, Segment, free_bytes
from ftd.tensorspec import TensorSpec
from ftd.units import MIB
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
            DaemonConfig(receive=True, pin="none", huge_pages="never", **config),
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

    def put(self, *parts: tuple[int, int, bytes], slot: int = 0, digests: Sequence[bytes] | None = None) -> None:
        sizes = [len(data) for _, _, data in parts]
        for (_, _, data), start in zip(parts, places(sizes), strict=False):
            os.pwrite(self._fd, data, slot * self.staging.slot_bytes + start)
        told = digests or [xxhash.xxh3_128_digest(data) for _, _, data in parts]
        self.reception.put(
            Put(
                self.staging.token,
                slot,
                tuple(
                    Part(tensor, offset, len(data), digest)
                    for (tensor, offset, data), digest in zip(parts, told, strict=True)
                ),
            )
        )

    def put_all(self) -> None:
        self.put((0, 0, DATA[A.name]), (1, 0, DATA[B.name]))

    def end(self) -> None:
        os.close(self._fd)
        self.reception.cancel()
        self.reception.abort()


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


@pytest.mark.parametrize(
    ("told", "threads", "free", "slots", "slot_bytes"),
    [
        (Begin(0, 0), 1, 1 << 61, 1, 4096),
        (Begin(1, 0), 1, 1 << 61, 1, 4096),
        (Begin(4097, 5000), 1, 1 << 61, 1, 8192),
        (Begin(100, 5000), 1, 1 << 61, 1, 8192),
        (Begin(PIECE_BYTES, 0), 4, 1 << 61, 1, PIECE_BYTES),
        (Begin(PIECE_BYTES + 1, 0), 4, 1 << 61, 2, PIECE_BYTES),
        (Begin(1 << 60, 0), 1, 1 << 61, 2, PIECE_BYTES),
        (Begin(1 << 60, 5 * PIECE_BYTES), 1, 1 << 61, 5, PIECE_BYTES),
        (Begin(1 << 60, 0), 64, 1 << 61, MAX_SLOTS, PIECE_BYTES),
        (Begin(0, 1 << 60), 1, 1 << 61, MAX_SLOTS, PIECE_BYTES),
        (Begin(40 * MIB, 0), 64, 64 * MIB, 1, PIECE_BYTES),  # /dev/shm of a container
        (Begin(40 * MIB, 0), 64, 80 * MIB, 2, PIECE_BYTES),
        (Begin(40 * MIB, 0), 64, 30 * MIB, 1, PIECE_BYTES),
    ],
)
def test_no_more_is_staged_than_there_is_to_hand_over_and_never_more_than_the_bound(
    told: Begin, threads: int, free: int, slots: int, slot_bytes: int
) -> None:
    assert module._slots(told, threads, free) == (slots, slot_bytes)


def test_it_is_closed_to_others_and_has_no_hole(publisher: Callable[..., Publisher], names: Names, umask: None) -> None:
    publisher(5 * MIB)
    path = SHM_DIR / names.staging(1)[1:]
    assert mode_of(path) == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size == 5 * MIB


def test_it_has_no_name_once_its_publisher_has_it_open(publisher: Callable[..., Publisher], names: Names) -> None:
    one = publisher()
    assert left(names) == ["g1.staging"]
    one.describe()
    assert left(names) == ["g1.0"]


def test_a_full_tmpfs_is_an_error_and_no_signal(names: Names, in_child: InChild) -> None:
    def begin() -> list[str]:
        with pytest.raises(MemoryShortError, match="cannot be written: no space left"):
            Publisher(names, 64 * MIB)
        return left(names)

    assert in_child(begin, shm="size=8m") == []


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
    ("parts", "slot"),
    [
        ([(0, 0, b"x" * 299)], 0),  # no whole piece
        ([(0, 1, b"x" * 299)], 0),
        ([(0, 0, b"x" * 301)], 0),
        ([(4, 0, b"x")], 0),  # no such tensor
        ([(2, 0, b"x" * 300)], 0),  # a tie
        ([(3, 0, b"x")], 0),  # without bytes
        ([(0, 0, b"x" * 300)], 1),  # no such slot
        ([(0, 0, DATA[A.name]), (0, 0, DATA[A.name])], 0),  # twice
    ],
)
def test_what_is_no_piece_of_what_was_described_is_refused(
    publisher: Callable[..., Publisher], parts: list[tuple[int, int, bytes]], slot: int
) -> None:
    one = publisher()
    one.describe()
    with pytest.raises(FrameError, match=r"expected a piece that is not here yet|there is no such slot"):
        one.put(*parts, slot=slot)


def test_parts_beyond_their_slot_are_refused(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    specs = tuple(TensorSpec(f"t{i}", "U8", (2000,)) for i in range(3))
    one.describe(Description(specs))
    one.put((0, 0, bytes(2000)), (1, 0, bytes(2000)))
    with pytest.raises(FrameError, match="there is no such slot"):
        one.put((2, 0, bytes(2000)), (0, 0, bytes(2000)), (1, 0, bytes(2000)))


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
    os.ftruncate(one._fd, 0)
    with pytest.raises(PublishDamagedError, match="cut short"):
        one.reception.put(Put(one.staging.token, 0, (Part(0, 0, 300, bytes(16)),)))


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
