import math
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd._version import PROTOCOL
from ftd.errors import MemoryShortError, ProtocolMismatchError, SegmentError
from ftd.packing import pack, unpack_map
from ftd.shm import manifest as module
from ftd.shm.digest import whole_digest
from ftd.shm.layout import Extent, Placed, lay_out
from ftd.shm.manifest import (
    FILES_MAGIC,
    MANIFEST_MAGIC,
    Manifest,
    SegmentFact,
    decode_files,
    decode_manifest,
    digest_of,
    encode_files,
    encode_manifest,
    read_published,
    read_segment,
    seal,
    unseal,
    write_segment,
)
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment, inode_of, path_of
from ftd.tensorspec import DTYPE_BITS, TensorSpec

InChild = Callable[..., Any]

GOLDEN = Manifest(
    namespace="a",
    generation=3,
    fingerprint="f" * 32,
    structure="5" * 32,
    source={"kind": "safetensors", "path": "/m", "files": [{"name": "m.safetensors", "bytes": 99}]},
    created_s=1.5,
    segments=(SegmentFact("/ftd.a.g3.0", 4096, 17),),
    files_inode=18,
    layers=("", "layers.0"),
    tensors=(
        Placed(TensorSpec("scale", "F32", ()), 0, Extent(0, 0, 4)),
        Placed(TensorSpec("layers.0.w", "BF16", (2, 3)), 1, Extent(0, 512, 12)),
    ),
    digests=(b"0123456789abcdef", b"fedcba9876543210"),
)
#: `encode_manifest(GOLDEN)`: the whole segment.
GOLDEN_MANIFEST = bytes.fromhex(
    "6674646d616e6966 0100 0100 00000000 5e01000000000000"
    "31fa6485a3065575339dde2b97e1e994"
    "8ba96e616d657370616365a161aa67656e65726174696f6e03ab66696e6765727072696e74d92066666666666666666666666666"
    "66666666666666666666666666666666666666a9737472756374757265d920353535353535353535353535353535353535353535"
    "3535353535353535353535a6736f7572636583a46b696e64ab7361666574656e736f7273a470617468a22f6da566696c65739182"
    "a46e616d65ad6d2e7361666574656e736f7273a5627974657363a9637265617465645f73cb3ff8000000000000a87365676d656e"
    "74739193ab2f6674642e612e67332e30cd100011ab66696c65735f696e6f646512a66c617965727392a0a86c61796572732e30a7"
    "74656e736f72739296a57363616c65a34633329000000096aa6c61796572732e302e77a4424631369202030100cd0200a7646967"
    "65737473c4203031323334353637383961626364656666656463626139383736353433323130"
)
#: `encode_files({"config.json": b"{}", "a/b": b""})`.
GOLDEN_FILES = bytes.fromhex(
    "66746466696c6573 0100 0100 00000000 1700000000000000"
    "e1a2de10b4f11ae59ff9763430d711ac"
    "82ab636f6e6669672e6a736f6ec4027b7da3612f62c400"
)


def test_golden_manifest() -> None:
    assert encode_manifest(GOLDEN) == GOLDEN_MANIFEST
    assert decode_manifest(GOLDEN_MANIFEST) == GOLDEN


def test_golden_files() -> None:
    files = {"config.json": b"{}", "a/b": b""}
    assert encode_files(files) == GOLDEN_FILES
    assert decode_files(GOLDEN_FILES) == files


TEXTS = st.text(max_size=12)
SIZES = st.integers(0, 2**63)
SPECS = st.builds(
    TensorSpec,
    TEXTS,
    st.sampled_from([name for name, bits in DTYPE_BITS.items() if bits % 8 == 0]),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    specs = draw(st.lists(SPECS, max_size=8, unique_by=lambda spec: spec.name))
    layout = lay_out(specs, lambda name: name[:1], page_bytes=4096, segment_bytes=8192)
    return Manifest(
        namespace=draw(TEXTS),
        generation=draw(SIZES),
        fingerprint=draw(TEXTS),
        structure=draw(TEXTS),
        source={"kind": draw(TEXTS), "path": draw(TEXTS), "files": [{"name": draw(TEXTS), "bytes": draw(SIZES)}]},
        created_s=draw(st.floats(0, 1e12)),
        segments=tuple(SegmentFact(f"/s{i}", size, draw(SIZES)) for i, size in enumerate(layout.segments)),
        files_inode=draw(SIZES),
        layers=layout.layers,
        tensors=layout.tensors,
        digests=tuple(os.urandom(16) for _ in layout.tensors) if draw(st.booleans()) else (),
    )


@given(manifests())
def test_a_manifest_survives(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


RELATIVE = TEXTS.filter(lambda name: name and not name.startswith("/") and ".." not in name.split("/"))


@given(st.dictionaries(RELATIVE, st.binary(max_size=50), max_size=5))
def test_files_survive(files: dict[str, bytes]) -> None:
    assert decode_files(encode_files(files)) == files


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "../x", "a/../../x"])
def test_a_file_outside_its_directory_is_refused(name: str) -> None:
    """`write_files` would overwrite it."""
    with pytest.raises(SegmentError, match="below a directory"):
        decode_files(encode_files({name: b""}))


def test_sums() -> None:
    assert GOLDEN.tensor_bytes == 16
    assert list(GOLDEN.bytes_by_dtype().items()) == [("BF16", 12), ("F32", 4)]


# --- the envelope ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "decode"),
    [(encode_manifest(GOLDEN), decode_manifest), (encode_files({"config.json": b"{}"}), decode_files)],
    ids=["manifest", "files"],
)
def test_every_damaged_byte_is_seen(data: bytes, decode: Callable[[bytes], object]) -> None:
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises((SegmentError, ProtocolMismatchError)):
                decode(bytes(damaged))


@pytest.mark.parametrize("decode", [decode_manifest, decode_files])
def test_every_other_length_is_seen(decode: Callable[[bytes], object]) -> None:
    data = encode_manifest(GOLDEN) if decode is decode_manifest else encode_files({"a": b"b"})
    for length in range(len(data)):
        with pytest.raises(SegmentError):
            decode(data[:length])
    with pytest.raises(SegmentError):
        decode(data + b"\0")


def test_one_is_not_taken_for_the_other() -> None:
    with pytest.raises(SegmentError, match="ftdfiles: found b'ftdmanif', expected the magic b'ftdfiles'"):
        decode_files(encode_manifest(GOLDEN))
    with pytest.raises(SegmentError, match="ftdmanif: found b'ftdfiles'"):
        decode_manifest(encode_files({}))


@pytest.mark.parametrize("major", [PROTOCOL[0] - 1, PROTOCOL[0] + 1])
def test_another_major_version_is_refused_with_both(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(module, "PROTOCOL", (major, 4))
    data = encode_manifest(GOLDEN)
    monkeypatch.undo()
    ours = f"{PROTOCOL[0]}.{PROTOCOL[1]}"
    with pytest.raises(ProtocolMismatchError, match=rf"ftdmanif is of protocol {major}\.4: expected {ours}"):
        decode_manifest(data)


def test_a_higher_minor_version_adds_fields_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROTOCOL", (PROTOCOL[0], PROTOCOL[1] + 1))
    data = seal(MANIFEST_MAGIC, pack(_values() | {"tomorrow": 1}))
    monkeypatch.undo()
    assert decode_manifest(data) == GOLDEN


def test_a_manifest_of_protocol_1_0_has_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _values()
    del values["digests"]
    monkeypatch.setattr(module, "PROTOCOL", (1, 0))
    data = seal(MANIFEST_MAGIC, pack(values))
    monkeypatch.undo()
    assert decode_manifest(data) == replace(GOLDEN, digests=())
    assert decode_manifest(data).digest() is None


def test_the_digest_of_all_is_that_of_the_weights_alone() -> None:
    assert GOLDEN.digest() == whole_digest(GOLDEN.tensors, GOLDEN.digests).hex()
    assert replace(GOLDEN, namespace="b", generation=4, fingerprint="", layers=("x", "y")).digest() == GOLDEN.digest()


@pytest.mark.parametrize("digests", [b"x" * 31, b"x" * 33, b"x" * 16, b"x" * 48, "x" * 32, [b"x" * 16] * 2, None, 0])
def test_digests_that_are_not_one_a_tensor_are_refused(digests: object) -> None:
    with pytest.raises(SegmentError, match="manifest cannot be read"):
        _decode(_values() | {"digests": digests})


@given(st.binary(max_size=200))
def test_the_envelope_gives_back_what_it_got(payload: bytes) -> None:
    assert unseal(FILES_MAGIC, seal(FILES_MAGIC, payload)) == payload


def test_two_publications_differ_in_the_digest_that_coord_holds() -> None:
    assert len(digest_of(GOLDEN_MANIFEST)) == 16
    assert digest_of(GOLDEN_MANIFEST) != digest_of(encode_manifest(GOLDEN)[:-1])


# --- contents that a checksum does not judge ---------------------------------------------------------------------


def _values() -> dict[str, Any]:
    return unpack_map(unseal(MANIFEST_MAGIC, encode_manifest(GOLDEN)))


def _decode(values: dict[str, Any]) -> Manifest:
    return decode_manifest(seal(MANIFEST_MAGIC, pack(values)))


#: name, dtype, shape, layer, segment, offset; the one segment has 4096 bytes.
ROWS = [
    ["a", "F32", [1024], 0, 0, 4],  # four bytes too far
    ["a", "F32", [1025], 0, 0, 0],
    ["a", "F32", [1], 0, 0, 4096],
    ["a", "F32", [1], 0, 0, -4],
    ["a", "F32", [1], 0, 1, 0],
    ["a", "F32", [1], 0, -1, 0],
    ["a", "F32", [1], 2, 0, 0],
    ["a", "F32", [1], -1, 0, 0],
    ["a", "F33", [1], 0, 0, 0],
    ["a", ["F32"], [1], 0, 0, 0],
    ["a", "F32", [-1], 0, 0, 4096],
    ["a", "F32", [-1, -1], 0, 0, 0],
    ["a", "F32", [0, -1], 0, 0, 0],
    ["a", "F32", [1.0], 0, 0, 0],
    ["a", "F32", [True], 0, 0, 0],
    ["a", "F32", "1", 0, 0, 0],
    ["a", "F32", 1, 0, 0, 0],
    ["a", "F4", [1], 0, 0, 0],  # half a byte
    ["a", "F32", [1], 0.0, 0, 0],
    ["a", "F32", [1], 0, 0.0, 0],
    ["a", "F32", [1], 0, 0, 0.0],
    ["a", "F32", [1], 0, 0, "0"],
    [1, "F32", [1], 0, 0, 0],
    ["a", "F32", [2**40, 2**40, 2**40], 0, 0, 0],
    ["a", "F32", [1], 0, 0],
    ["a", "F32", [1], 0, 0, 0, 0],
    None,
    7,
]


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_a_tensor_outside_its_segment_or_of_no_sense_is_refused(row: object) -> None:
    with pytest.raises(SegmentError, match="manifest cannot be read"):
        _decode(_values() | {"tensors": [row], "digests": b""})


def test_a_tensor_may_fill_its_segment_to_the_last_byte() -> None:
    rows = [["a", "F32", [1024], 0, 0, 0], ["b", "U8", [1], 0, 0, 4095]]
    values = _values() | {"tensors": rows}
    assert [placed.extent for placed in _decode(values).tensors] == [Extent(0, 0, 4096), Extent(0, 4095, 1)]


@pytest.mark.parametrize("missing", sorted(set(_values()) - {"digests"}))
def test_a_manifest_without_its_fields_is_refused(missing: str) -> None:
    values = _values()
    del values[missing]
    with pytest.raises(SegmentError, match="manifest cannot be read"):
        _decode(values)


@pytest.mark.parametrize("value", [None, 7, "text", [None], [[1]], math.inf], ids=repr)
@pytest.mark.parametrize("field", ["segments", "layers", "tensors", "source", "generation", "created_s", "files_inode"])
def test_fields_of_another_type_are_refused_or_harmless(field: str, value: object) -> None:
    try:
        decoded = _decode(
            _values()
            | {field: value, "tensors": [], "digests": b""}
            | ({"tensors": value} if field == "tensors" else {})
        )
    except SegmentError:
        return
    encode_manifest(decoded)


@pytest.mark.parametrize("payload", [b"", b"\xc1", pack([]), pack({"a": 1}), pack({"a": None}), pack({"a": "text"})])
def test_files_of_another_shape_are_refused(payload: bytes) -> None:
    with pytest.raises(SegmentError, match="ftdfiles"):
        decode_files(seal(FILES_MAGIC, payload))


# --- segments ----------------------------------------------------------------------------------------------------


@pytest.mark.leaves_segments
@pytest.mark.parametrize("length", [1, 4096, 10_000])
def test_a_segment_holds_exactly_its_bytes(names: Names, length: int) -> None:
    data = os.urandom(length)
    inode = write_segment(names.manifest(1), data, Access(0o640))
    assert inode == inode_of(names.manifest(1))
    assert read_segment(names.manifest(1), length) == data
    assert stat.S_IMODE(path_of(names.manifest(1)).stat().st_mode) == 0o640
    with Segment.open(names.manifest(1)) as segment:  # type: ignore[union-attr]
        assert not segment.has_hole()


@pytest.mark.leaves_segments
def test_a_segment_that_is_longer_than_it_may_be_is_not_read(names: Names) -> None:
    write_segment(names.files(1), bytes(101), Access())
    with pytest.raises(SegmentError, match=r"g1\.files holds 101 bytes: expected at most 100"):
        read_segment(names.files(1), 100)


def test_a_segment_that_is_not_there_is_none(names: Names) -> None:
    assert read_segment(names.files(1), 100) is None


@pytest.mark.leaves_segments
def test_what_was_published_is_read_and_nothing_else(names: Names) -> None:
    manifest = replace(GOLDEN, namespace=names.namespace)
    data, path = encode_manifest(manifest), path_of(names.manifest(3))
    assert manifest.generation == 3
    write_segment(names.manifest(3), data, Access())
    assert read_published(names, 3, digest_of(data)) == manifest
    with pytest.raises(SegmentError, match=f"{path} is not what was published: its checksum differs"):
        read_published(names, 3, digest_of(data + b"x"))
    os.rename(path, path_of(names.manifest(4)))
    with pytest.raises(SegmentError, match=f"is of generation 3 of '{names.namespace}': expected generation 4 of"):
        read_published(names, 4, digest_of(data))
    with pytest.raises(SegmentError, match=f"{path} is gone: expected the manifest of generation 3") as caught:
        read_published(names, 3, digest_of(data))
    assert caught.value.remedy == "restart the daemon"


def test_a_full_mount_leaves_no_half_written_segment(names: Names, in_child: InChild) -> None:
    def fill() -> int | None:
        with pytest.raises(MemoryShortError, match="manifest cannot be written"):
            write_segment(names.manifest(1), bytes(1 << 20), Access())
        return inode_of(names.manifest(1))

    assert in_child(fill, shm="size=512k") is None
