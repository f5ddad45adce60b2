"""The manifest of a generation: which tensors lie where, in a segment of its own, checksummed.

    0    8 bytes magic "ftdmanif" · u16 major · u16 minor · u32 zero · u64 payload bytes, little-endian
    24   16 bytes BLAKE2b of these 24 bytes and the payload
    40   payload: a msgpack map (`docs/format.md`)

The sidecar files of a generation (`files`) use the same envelope with the magic "ftdfiles" and a map of names to
bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from typing import Any

from ftd._version import PROTOCOL
from ftd.errors import ProtocolMismatchError, SegmentError
from ftd.packing import no_collection, pack, unpack_map
from ftd.shm.digest import DIGEST_BYTES, whole_digest
from ftd.shm.layout import Extent, Placed, distinct_bytes
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment, path_of
from ftd.tensorspec import DTYPE_BITS, TensorSpec
from ftd.units import MIB

MANIFEST_MAGIC = b"ftdmanif"
FILES_MAGIC = b"ftdfiles"
#: What a reader accepts: a million tensors with long names fit.
MAX_MANIFEST_BYTES = 512 * MIB
#: Sidecar files are at most 32 MiB in all; their names and the envelope come on top.
MAX_FILES_BYTES = 40 * MIB
_HEAD = struct.Struct("<8sHHIQ")
_CHECKSUM_BYTES = 16
_PAYLOAD_AT = _HEAD.size + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class SegmentFact:
    """A weights segment as published. The inode tells it from one of the same name that was made later."""

    name: str
    bytes: int
    inode: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Manifest:
    """What a published generation holds.

    Attributes:
        fingerprint: of source identity, layout rules and transforms; decides adoption.
        structure: of names, types, shapes and layers; decides whether a profile fits.
        source: {"kind", "path", "files": [{"name", "bytes"}]}.
        files_inode: of the sidecar segment; 0 where there is none.
        created_s: wall clock, for people.
        digests: of each tensor, in their order; empty where none were computed.
    """

    namespace: str
    generation: int
    fingerprint: str
    structure: str
    source: dict[str, Any]
    created_s: float
    segments: tuple[SegmentFact, ...]
    files_inode: int
    layers: tuple[str, ...]
    tensors: tuple[Placed, ...]
    digests: tuple[bytes, ...] = ()

    def digest(self) -> str | None:
        """Hex digest of all tensors, the same for the same weights wherever they lie; None without digests.

        Computed at each call.
        """
        return whole_digest(self.tensors, self.digests).hex() if self.digests else None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, padding not counted, and those that several names share once."""
        return distinct_bytes(self.tensors)

    def bytes_by_dtype(self) -> dict[str, int]:
        by_dtype: dict[str, list[Placed]] = {}
        for placed in self.tensors:
            by_dtype.setdefault(placed.spec.dtype, []).append(placed)
        return {dtype: distinct_bytes(by_dtype[dtype]) for dtype in sorted(by_dtype)}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the whole segment."""
    payload = {
        "namespace": manifest.namespace,
        "generation": manifest.generation,
        "fingerprint": manifest.fingerprint,
        "structure": manifest.structure,
        "source": manifest.source,
        "created_s": manifest.created_s,
        "segments": [[s.name, s.bytes, s.inode] for s in manifest.segments],
        "files_inode": manifest.files_inode,
        "layers": list(manifest.layers),
        "tensors": [
            [p.spec.name, p.spec.dtype, list(p.spec.shape), p.layer, p.extent.segment, p.extent.offset]
            for p in manifest.tensors
        ],
        "digests": b"".join(manifest.digests),
    }
    return seal(MANIFEST_MAGIC, pack(payload))


def decode_manifest(data: bytes) -> Manifest:
    """The manifest, checked so far that no extent leaves its segment.

    Raises:
        SegmentError: wrong magic, length, checksum or contents.
        ProtocolMismatchError: another major version.
    """
    payload = unseal(MANIFEST_MAGIC, data)
    with no_collection():
        return _manifest(payload)


def _manifest(payload: bytes) -> Manifest:
    try:
        values = unpack_map(payload)
        segments = tuple(SegmentFact(str(n), int(b), int(i)) for n, b, i in values["segments"])
        layers = tuple(map(str, values["layers"]))
        tensors = tuple(_placed(row, segments, len(layers)) for row in values["tensors"])
        return Manifest(
            namespace=str(values["namespace"]),
            generation=int(values["generation"]),
            fingerprint=str(values["fingerprint"]),
            structure=str(values["structure"]),
            source=dict(values["source"]),
            created_s=float(values["created_s"]),
            segments=segments,
            files_inode=int(values["files_inode"]),
            layers=layers,
            tensors=tensors,
            digests=_digests(values.get("digests", b""), len(tensors)),  # absent before protocol 1.1
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise SegmentError(f"manifest cannot be read: {error!r}", "restart the daemon") from None


def _digests(joined: bytes, count: int) -> tuple[bytes, ...]:
    if type(joined) is not bytes or len(joined) not in (0, DIGEST_BYTES * count):
        raise ValueError(f"digests {joined[:16]!r} of {count} tensors")
    return tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))


def _placed(row: list[Any], segments: tuple[SegmentFact, ...], layer_count: int) -> Placed:
    name, dtype, shape, layer, segment, offset = row
    numbers = (*shape, layer, segment, offset)
    if type(name) is not str or set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError(f"tensor {name!r} of shape {shape!r} in layer {layer!r} at {segment!r}:{offset!r}")
    if dtype not in DTYPE_BITS or layer >= layer_count:
        raise ValueError(f"tensor {name!r} of type {dtype!r} in layer {layer}")
    spec = TensorSpec(name, dtype, tuple(shape))
    nbytes = spec.nbytes
    if nbytes and not (segment < len(segments) and offset <= segments[segment].bytes - nbytes):
        raise ValueError(f"tensor {name!r} at {segment}:{offset}+{nbytes} lies outside its segment")
    return Placed(spec, layer, Extent(segment, offset, nbytes))


def seal(magic: bytes, payload: bytes) -> bytes:
    """Payload in its envelope."""
    head = _HEAD.pack(magic, *PROTOCOL, 0, len(payload))
    return b"".join((head, _digest(head, payload), payload))


def unseal(magic: bytes, data: bytes) -> bytes:
    """Payload of an envelope.

    Raises:
        SegmentError: wrong magic, length or checksum.
        ProtocolMismatchError: another major version.
    """
    what = magic.decode()
    if len(data) < _PAYLOAD_AT or data[:8] != magic:
        raise SegmentError(f"{what}: found {data[:8]!r}, expected the magic {magic!r}", "restart the daemon")
    _, major, minor, _, length = _HEAD.unpack_from(data)
    if major != PROTOCOL[0]:
        raise ProtocolMismatchError(
            f"{what} is of protocol {major}.{minor}: expected {PROTOCOL[0]}.{PROTOCOL[1]}",
            "run the same release of ftd on both sides",
        )
    payload = data[_PAYLOAD_AT:]
    if len(payload) != length:
        raise SegmentError(f"{what}: found {len(payload)} bytes of payload, expected {length}", "restart the daemon")
    if _digest(data[: _HEAD.size], payload) != data[_HEAD.size : _PAYLOAD_AT]:
        raise SegmentError(f"{what}: checksum of {length} bytes does not match", "restart the daemon")
    return payload


def digest_of(data: bytes) -> bytes:
    """BLAKE2b-128. The coordination block holds that of the manifest segment: it ties both to one publication."""
    return _digest(data)


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def write_segment(name: str, data: bytes, access: Access) -> int:
    """A new segment with exactly these bytes, written by pwrite so that it has no hole; gives its inode."""
    with Segment.create(name, 0, access) as segment:
        try:
            segment.write(data)
        except BaseException:
            segment.unlink()
            raise
        return segment.inode


def read_segment(name: str, limit_bytes: int, *, inode: int | None = None) -> bytes | None:
    """The bytes of a segment; None where there is none, or none of that inode.

    Raises:
        SegmentError: it is longer than `limit_bytes`.
        AccessError: it may not be read.
    """
    segment = Segment.open(name)
    if segment is None:
        return None
    with segment:
        if inode is not None and segment.inode != inode:
            return None
        size = segment.size
        if size > limit_bytes:
            raise SegmentError(f"{name} holds {size} bytes: expected at most {limit_bytes}", "restart the daemon")
        return os.pread(segment.fileno(), size, 0)


def read_published(names: Names, generation: int, digest: bytes) -> Manifest:
    """The manifest of a generation, believed only when it is what the coordination block says: `digest`, of the whole
    segment.

    Raises:
        SegmentError: it is gone, or not what was published.
        ProtocolMismatchError: another major version.
        AccessError: it may not be read.
    """
    name = names.manifest(generation)
    path = path_of(name)
    data = read_segment(name, MAX_MANIFEST_BYTES)
    if data is None:
        raise SegmentError(f"{path} is gone: expected the manifest of generation {generation}", "restart the daemon")
    if digest_of(data) != digest:
        raise SegmentError(f"{path} is not what was published: its checksum differs", "restart the daemon")
    manifest = decode_manifest(data)
    if (manifest.namespace, manifest.generation) != (names.namespace, generation):
        raise SegmentError(
            f"{path} is of generation {manifest.generation} of {manifest.namespace!r}: expected generation {generation}"
            f" of {names.namespace!r}",
            "restart the daemon",
        )
    return manifest


def encode_files(files: dict[str, bytes]) -> bytes:
    return seal(FILES_MAGIC, pack(files))


def decode_files(data: bytes) -> dict[str, bytes]:
    """Sidecar files by relative name.

    Raises:
        SegmentError: wrong magic, length, checksum or contents.
    """
    try:
        values = unpack_map(unseal(FILES_MAGIC, data))
    except ValueError as error:
        raise SegmentError(f"ftdfiles cannot be read: {error}", "restart the daemon") from None
    outside = [name for name in values if name.startswith("/") or ".." in name.split("/") or not name]
    if outside:
        raise SegmentError(f"ftdfiles names {outside[0]!r}: expected paths below a directory", "restart the daemon")
    if not all(isinstance(value, bytes) for value in values.values()):
        raise SegmentError("ftdfiles holds something that is no file: expected bytes", "restart the daemon")
    return values
