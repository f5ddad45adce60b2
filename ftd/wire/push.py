"""What a follower says to have its weights pushed into GPU memory of its own. Pure, plain fields only.

    push  {"generation": int, "inodes": [int, …], "gpu": 16 bytes,
           "targets": [[handle, [[dst, segment, offset, nbytes], …]], …]}
          → {"bytes": int}

`inodes` are the segments': generations count from 1 again after an orderly stop. `gpu` is the GPU's UUID: ordinals
differ between processes. A handle is CUDA's name of an allocation for other processes (64 bytes); `dst` counts from the
allocation's start, `offset` from the segment's. The answer comes once all bytes are there and the daemon has closed
every allocation; so does an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftd.errors import FrameError

PUSH = "push"
GPU_BYTES = 16
HANDLE_BYTES = 64
#: Of one request: so many fit into a frame.
MAX_PIECES = 16_384
MAX_TARGETS = 2_048
_MAX = 1 << 62


class PushPiece(NamedTuple):
    dst: int
    segment: int
    offset: int
    nbytes: int


class PushTarget(NamedTuple):
    handle: bytes
    pieces: tuple[PushPiece, ...]


@dataclass(frozen=True, slots=True)
class PushRequest:
    """One request; see `requests` for more than one holds."""

    generation: int
    inodes: tuple[int, ...]
    gpu: bytes
    targets: tuple[PushTarget, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for target in self.targets for piece in target.pieces)

    def to_args(self) -> dict[str, Any]:
        targets = [[target.handle, [list(piece) for piece in target.pieces]] for target in self.targets]
        return {"generation": self.generation, "inodes": list(self.inodes), "gpu": self.gpu, "targets": targets}

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> PushRequest:
        """The request that a follower made. Whether there are such segments is for `check_pieces`.

        Raises:
            FrameError: it is malformed or too large.
        """
        generation, inodes, gpu, given = map(args.get, ("generation", "inodes", "gpu", "targets"))
        named = isinstance(inodes, list) and all(map(_is_size, inodes)) and _is_size(generation)
        if not (named and _is_bytes(gpu, GPU_BYTES) and isinstance(given, list)):
            raise FrameError("a push without generation, inodes, gpu or targets of their types: expected all", _REMEDY)
        if not (0 < len(given) <= MAX_TARGETS and all(map(_is_target, given))):
            raise FrameError(f"a push of {len(given)} targets: expected 1 to {MAX_TARGETS} well-formed ones", _REMEDY)
        targets = tuple(PushTarget(handle, tuple(PushPiece(*each) for each in pieces)) for handle, pieces in given)
        if sum(len(target.pieces) for target in targets) > MAX_PIECES:
            raise FrameError(f"a push of more than {MAX_PIECES} pieces: expected no more", _REMEDY)
        return PushRequest(int(generation or 0), tuple(inodes or ()), bytes(gpu or b""), targets)

    def check_pieces(self, segments: Sequence[int]) -> None:
        """
        Args:
            segments: bytes of each.

        Raises:
            FrameError: a piece leaves its segment, or there is no such segment.
        """
        for piece in (piece for target in self.targets for piece in target.pieces):
            if piece.segment >= len(segments) or piece.offset + piece.nbytes > segments[piece.segment]:
                raise FrameError(
                    f"a push of {piece.nbytes} bytes at {piece.offset} of segment {piece.segment}: expected them in "
                    f"one of {len(segments)} segments",
                    _REMEDY,
                )


def requests(
    generation: int, inodes: Sequence[int], gpu: bytes, targets: Sequence[PushTarget]
) -> Iterator[PushRequest]:
    """The same in as few requests as hold it."""
    taken: list[PushTarget] = []
    room = MAX_PIECES
    for handle, pieces in targets:
        left = pieces
        while left:
            if not room or len(taken) == MAX_TARGETS:
                yield PushRequest(generation, tuple(inodes), gpu, tuple(taken))
                taken, room = [], MAX_PIECES
            taken.append(PushTarget(handle, left[:room]))
            left, room = left[room:], max(0, room - len(left))
    if taken:
        yield PushRequest(generation, tuple(inodes), gpu, tuple(taken))


def push_result(nbytes: int) -> dict[str, Any]:
    return {"bytes": nbytes}


def bytes_pushed(result: Mapping[str, Any]) -> int:
    """
    Raises:
        FrameError: the answer does not say.
    """
    nbytes = result.get("bytes")
    if not _is_size(nbytes):
        raise FrameError(f"an answer to push whose 'bytes' is {nbytes!r:.40}: expected a number", _REMEDY)
    return int(nbytes or 0)


_REMEDY = "the other end of the socket is no ftd of this protocol"


def _is_target(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and _is_bytes(value[0], HANDLE_BYTES)):
        return False
    pieces = value[1]
    return isinstance(pieces, list) and bool(pieces) and all(map(_is_piece, pieces))


def _is_piece(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_size, value)) and value[3] > 0


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX


def _is_bytes(value: Any, length: int) -> bool:
    return isinstance(value, bytes) and len(value) == length
