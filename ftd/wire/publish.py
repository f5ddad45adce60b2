"""What a process says to have its tensors published, and what it is told. Pure, plain fields only.

    publish_begin     {"bytes", "description"}      → {"token", "name", "inode", "lanes", "slots", "slot_bytes"}
    publish_wait      {"token"}                     → {"generation", "fingerprint", "digest", "tensors", "bytes"}
    publish_describe  {"token", "bytes", "digest"}  → {}
    publish_lane      {"token", "lane"}             … {"parts": [[tensor, offset, nbytes, digest], …]} … → {}
    publish_commit    {"token"}                     → {}

`publish_wait` is answered when the generation is published, and its end, whatever ends it, is that of the publisher.
Puts follow `publish_lane` on its connection (`lane.py`), which is answered behind the last one. Bulk lies in the
staging segment `name`: the description from its first byte on, later the parts of a put in the slot whose turn it is,
one behind the other, each from a multiple of `PART_ALIGNMENT` on. `docs/decisions/receive.md` says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ftd.errors import FrameError
from ftd.packing import no_collection, pack, unpack_map
from ftd.tensorspec import DTYPE_BITS, TensorSpec
from ftd.units import MIB

PUBLISH_BEGIN = "publish_begin"
PUBLISH_WAIT = "publish_wait"
PUBLISH_DESCRIBE = "publish_describe"
PUBLISH_LANE = "publish_lane"
PUBLISH_COMMIT = "publish_commit"

TOKEN_BYTES = 16
DIGEST_BYTES = 16
#: Of one put: so many fit into a frame.
MAX_PARTS = 8192
#: Of a part in its slot: the widest element has 8 bytes, a cache line 64.
PART_ALIGNMENT = 64
#: Of all sidecar files, as of those of a checkpoint.
MAX_FILES_BYTES = 32 * MIB
#: Of texts that end up in every status.
MAX_TEXT = 1000
_MAX = 1 << 62
_REMEDY = "the other end of the socket is no ftd of this protocol"


class Part(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of the tensor with that index, all of one piece.

    `digest` is the piece's XXH3-128 where this is its end, and else empty.
    """

    tensor: int
    offset: int
    nbytes: int
    digest: bytes


def places(sizes: Iterable[int]) -> list[int]:
    """Where parts of these bytes lie in their slot; behind them, where the next one would."""
    found, at = [], 0
    for nbytes in sizes:
        found.append(at)
        at = -(-(at + nbytes) // PART_ALIGNMENT) * PART_ALIGNMENT
    return [*found, at]


@dataclass(frozen=True, slots=True)
class Begin:
    """What a publisher has in mind: decides how much is staged, and nothing else.

    Attributes:
        nbytes: of the tensors.
        description_bytes: of the description.
    """

    nbytes: int
    description_bytes: int

    def to_args(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "description": self.description_bytes}

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> Begin:
        """
        Raises:
            FrameError: the request does not say.
        """
        return Begin(_size(args, "bytes"), _size(args, "description"))


def token_args(token: bytes) -> dict[str, Any]:
    return {"token": token}


def token_of(args: Mapping[str, Any]) -> bytes:
    """
    Raises:
        FrameError: there is none.
    """
    return _bytes(args, "token", TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Staging:
    """The segment by which weights travel, and the right to use it.

    Attributes:
        lanes: how many there may be.
        slots: of each lane, which has them one behind the other and fills them in turn.
    """

    token: bytes
    name: str
    inode: int
    lanes: int
    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        return self.lanes * self.slots * self.slot_bytes

    def to_result(self) -> dict[str, Any]:
        return {
            "token": self.token,
            "name": self.name,
            "inode": self.inode,
            "lanes": self.lanes,
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
        }

    @staticmethod
    def from_result(result: Mapping[str, Any]) -> Staging:
        """
        Raises:
            FrameError: it is malformed.
        """
        staging = Staging(
            token_of(result),
            _text(result, "name"),
            _size(result, "inode"),
            _size(result, "lanes"),
            _size(result, "slots"),
            _size(result, "slot_bytes"),
        )
        if not staging.nbytes:
            raise FrameError("a staging segment without bytes: expected some", _REMEDY)
        return staging


@dataclass(frozen=True, slots=True)
class Describe:
    """The description lies in the staging segment; `digest` is its BLAKE2b-128."""

    token: bytes
    nbytes: int
    digest: bytes

    @staticmethod
    def of(token: bytes, data: bytes) -> Describe:
        return Describe(token, len(data), _blake2b(data))

    def to_args(self) -> dict[str, Any]:
        return {"token": self.token, "bytes": self.nbytes, "digest": self.digest}

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> Describe:
        """
        Raises:
            FrameError: it is malformed.
        """
        return Describe(token_of(args), _size(args, "bytes"), _bytes(args, "digest", DIGEST_BYTES))

    def check(self, data: bytes) -> None:
        """
        Raises:
            FrameError: these are other bytes than were described.
        """
        if len(data) != self.nbytes or _blake2b(data) != self.digest:
            raise FrameError(f"a description of {self.nbytes} bytes whose digest differs", "publish again")


def lane_args(token: bytes, lane: int) -> dict[str, Any]:
    return {"token": token, "lane": lane}


def lane_of(args: Mapping[str, Any]) -> int:
    """
    Raises:
        FrameError: there is none.
    """
    return _size(args, "lane")


@dataclass(frozen=True, slots=True)
class Put:
    """The next slot is full; without parts: there is no more."""

    parts: tuple[Part, ...]

    def to_map(self) -> dict[str, Any]:
        return {"parts": [list(part) for part in self.parts]}

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Put:
        """The parts as told; whether there are such is for whoever knows the description.

        Raises:
            FrameError: it is malformed or too large.
        """
        given = fields.get("parts")
        if not (isinstance(given, list) and len(given) <= MAX_PARTS and all(map(_is_part, given))):
            raise FrameError(f"a put whose 'parts' are {given!r:.40}: expected at most {MAX_PARTS} parts", _REMEDY)
        return Put(tuple(Part(*each) for each in given))


@dataclass(frozen=True, slots=True)
class Description:
    """What a process publishes.

    Attributes:
        tensors: in any order; names are unique.
        ties: names of tensors that have the bytes of another one, of the same type and shape, and that one's name.
        transform: what was done to the weights; part of the fingerprint.
        source: whence they come, for people.
        layers: patterns that group tensors into layers; None leaves it to the daemon's.
        files: sidecar files by relative name.
    """

    tensors: tuple[TensorSpec, ...]
    ties: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    transform: str = ""
    source: str = ""
    layers: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def tensor_bytes(self) -> int:
        """Bytes that travel: those of ties do not."""
        return sum(spec.nbytes for spec in self.tensors if spec.name not in self.ties)

    def encode(self) -> bytes:
        return pack(
            {
                "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors],
                "ties": dict(self.ties),
                "transform": self.transform,
                "source": self.source,
                "layers": None if self.layers is None else list(self.layers),
                "files": dict(self.files),
            }
        )

    @staticmethod
    def decode(data: bytes) -> Description:
        """The description, checked in itself.

        Raises:
            FrameError: it is malformed, or contradicts itself.
        """
        try:
            with no_collection():
                return _description(unpack_map(data))
        except (ValueError, TypeError, KeyError) as error:
            raise FrameError(f"a description that cannot be read: {error!r:.200}", _REMEDY) from None


def _description(values: Mapping[str, Any]) -> Description:
    tensors = tuple(_spec(*row) for row in values["tensors"])
    by_name = {spec.name: spec for spec in tensors}
    if len(by_name) != len(tensors):
        raise ValueError("two tensors of one name")
    ties, files, layers = values["ties"], values["files"], values["layers"]
    if not (isinstance(ties, dict) and isinstance(files, dict) and isinstance(layers, list | None)):
        raise TypeError("ties, files or layers of another type")
    for name, of in ties.items():
        one, other = by_name[name], by_name[of]
        if of in ties or not one.nbytes or (one.dtype, one.shape) != (other.dtype, other.shape):
            raise ValueError(f"{name!r} is tied to {of!r}, which cannot be")
    for name, contents in files.items():
        if type(contents) is not bytes or not is_file_name(name):
            raise ValueError(f"file {name!r}")
    if sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise ValueError(f"files of more than {MAX_FILES_BYTES} bytes")
    texts = (values["transform"], values["source"], *(layers or ()))
    if not all(type(text) is str and len(text) <= MAX_TEXT for text in texts):
        raise ValueError("a text that is none, or too long")
    return Description(
        tensors, ties, values["transform"], values["source"], None if layers is None else tuple(layers), files
    )


def _spec(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    if type(name) is not str or dtype not in DTYPE_BITS or not all(map(_is_size, shape)):
        raise ValueError(f"tensor {name!r} of type {dtype!r} and shape {shape!r}")
    spec = TensorSpec(name, dtype, tuple(shape))
    if not _is_size(spec.nbytes):  # raises where elements fill no whole bytes
        raise ValueError(f"tensor {name!r} of {spec.nbytes} bytes")
    return spec


def is_file_name(name: Any) -> bool:
    """Whether it is a relative path below a directory, as sidecar files are named."""
    return isinstance(name, str) and "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


@dataclass(frozen=True, slots=True)
class Published:
    """A generation that was made of what a process handed over.

    Attributes:
        fingerprint: of weights, sidecar files, `transform` and layout.
        digest: hex digest of all tensors, as `ftd status` shows it.
        tensors: how many; ties count.
        nbytes: bytes of them; ties don't count.
    """

    generation: int
    fingerprint: str
    digest: str
    tensors: int
    nbytes: int

    def to_result(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "fingerprint": self.fingerprint,
            "digest": self.digest,
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }

    @staticmethod
    def from_result(result: Mapping[str, Any]) -> Published:
        """
        Raises:
            FrameError: it is malformed.
        """
        return Published(
            _size(result, "generation"),
            _text(result, "fingerprint"),
            _text(result, "digest"),
            _size(result, "tensors"),
            _size(result, "bytes"),
        )


def _blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _size(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if not _is_size(value):
        raise FrameError(f"a message of publishing whose {key!r} is {value!r:.40}: expected a number", _REMEDY)
    return int(value or 0)


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise FrameError(f"a message of publishing whose {key!r} is {value!r:.40}: expected text", _REMEDY)
    return value


def _bytes(fields: Mapping[str, Any], key: str, length: int) -> bytes:
    value = fields.get(key)
    if not isinstance(value, bytes) or len(value) != length:
        raise FrameError(f"a message of publishing whose {key!r} is {value!r:.40}: expected {length} bytes", _REMEDY)
    return value


def _is_part(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 4 and all(map(_is_size, value[:3])) and value[2] > 0):
        return False
    return isinstance(value[3], bytes) and len(value[3]) in (0, DIGEST_BYTES)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX
