"""Publishing from a process: tensors that an engine has processed, handed to a daemon that waits for them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftd.clock import Deadline
from ftd.config.patterns import validate_patterns
from ftd.cuda.pin import Region, register
from ftd.cuda.runtime import load_runtime
from ftd.errors import (
    ControlError,
    CreatorHungError,
    FtdError,
    NotRunningError,
    PublishRefusedError,
    SegmentError,
    UsageError,
)
from ftd.shm.coord import observe
from ftd.shm.digest import PieceDigester
from ftd.shm.names import Names
from ftd.shm.segment import Segment
from ftd.shm.state import State
from ftd.units import format_bytes
from ftd.wire.client import Asked
from ftd.wire.lane import LaneOut
from ftd.wire.publish import (
    MAX_FILES_BYTES,
    MAX_TEXT,
    PUBLISH_BEGIN,
    PUBLISH_COMMIT,
    PUBLISH_DESCRIBE,
    PUBLISH_WAIT,
    Begin,
    Describe,
    Description,
    Part,
    Published,
    Staging,
    is_file_name,
    token_args,
)
from ftd_client.creator import Creator
from ftd_client.forks import forget_after_fork
from ftd_client.handover import Cargo, Piece, batches, collect, fill, portions

log = logging.getLogger(__name__)

_POLL_S = 0.02
#: For a request to be taken, and for an answer that has begun; a daemon that is well needs microseconds.
_SEND_S = 10.0
#: Between two looks at a daemon that has not answered yet.
_LOOK_S = 1.0


def publish(
    namespace: str,
    weights: nn.Module | Mapping[str, torch.Tensor],
    *,
    transform: str = "",
    source: str = "",
    layers: Sequence[str] | None = None,
    files: Mapping[str, bytes] | None = None,
    timeout: float | None = 30.0,
) -> Published:
    """Hands tensors to the daemon of `namespace`, which was started with `--receive`, and returns once it has
    published them: from then on they can be attached to, and neither needs this process nor sees what it does to them.

    Nothing may write to the tensors meanwhile; what this process has queued for them on its GPUs is waited for.

    Args:
        weights: a model, of which `state_dict()` is published, or names and tensors, on any device. Names that have
            the same view of the same memory are stored once.
        transform: what was done to the weights, such as the engine, its version, quantisation and rank; part of the
            fingerprint.
        source: whence they come, for `ftd status`; this process where it is empty.
        layers: patterns that group tensors into layers, as in the daemon's configuration, which counts without them.
        files: sidecar files by relative name, for `Follower.files`; 32 MiB in all.
        timeout: seconds to wait for a daemon to appear; 0 or None does not wait.

    Raises:
        NotRunningError: there is no daemon.
        PublishRefusedError: it takes no weights, or not now (another process publishes, or has); or something is no
            plain tensor: all such are named.
        PublishDamagedError: a tensor changed while it was handed over.
        MemoryShortError: the weights do not fit; needed and free bytes are in the message.
        AccessError: this user may not publish there.
        CreatorHungError: the daemon lives and makes no progress.
        FtdError: the daemon ended, or does not speak this protocol.
    """
    cargo = collect(weights)
    description = _describe(cargo, transform, source, layers, files or {})
    with _Conversation(Names(namespace)) as conversation:
        try:
            return conversation.publish(cargo, description, Deadline.after(timeout or 0.0))
        except BaseException as error:
            # or the staging segment stays mapped while somebody keeps the error, or refers to it by what it refers to
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, FtdError):
                raise conversation.reason(error) from None
            raise


def _describe(
    cargo: Cargo, transform: str, source: str, layers: Sequence[str] | None, files: Mapping[str, bytes]
) -> Description:
    for what, text in (("transform", transform), ("source", source)):
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise UsageError(f"{what}: {text!r:.40} found, text of at most {MAX_TEXT} characters expected")
    try:
        validate_patterns(layers or ())
    except ValueError as error:
        raise UsageError(f"layers: {error}", "give patterns such as model.layers.*") from None
    wrong = [name for name, data in files.items() if not (is_file_name(name) and isinstance(data, bytes))]
    if wrong:
        raise UsageError(f"files: {wrong[0]!r} found, a relative path and bytes expected", "give {'config.json': b'…'}")
    size = sum(map(len, files.values()))
    if size > MAX_FILES_BYTES:
        raise UsageError(f"files: {format_bytes(size)} found, at most {format_bytes(MAX_FILES_BYTES)} expected")
    source = source or f"{Path(sys.argv[0]).name or 'python'} (pid {os.getpid()})"
    return Description(
        cargo.specs, cargo.ties, transform, source, None if layers is None else tuple(layers), dict(files)
    )


class _Conversation:
    """What is said with one daemon, from the first word to the last. Leaving its `with` ends what is under way.

    Its end of `publish_wait` is this process's life to the daemon: children that are forked meanwhile close theirs,
    and those of lanes.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._socket = Path()
        self._life: Asked | None = None
        self._lanes = list[LaneOut]()  # append is atomic
        self._stop = threading.Event()
        forget_after_fork(self)

    def publish(self, cargo: Cargo, description: Description, deadline: Deadline) -> Published:
        """
        Args:
            deadline: for a daemon to appear.
        """
        blob = description.encode()
        staging = self._begin(Begin(description.tensor_bytes, len(blob)), deadline)
        token = token_args(staging.token)
        self._life = self._asked(PUBLISH_WAIT, token)
        if len(blob) > staging.nbytes:
            raise PublishRefusedError(
                f"the names of {len(cargo.specs)} tensors and the files take {format_bytes(len(blob))}: expected at"
                f" most {format_bytes(staging.nbytes)}",
                "publish fewer tensors under shorter names",
            )
        memory = _open(staging)
        memory[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self._ask(PUBLISH_DESCRIBE, Describe.of(staging.token, blob).to_args())
        _synchronize(cargo)
        with _pinned(memory, cargo):
            self._send(staging, memory, cargo)
        self._ask(PUBLISH_COMMIT, token)
        return Published.from_result(self._reply(self._life))

    def _begin(self, begin: Begin, deadline: Deadline) -> Staging:
        while True:
            try:
                self._socket = Creator.find(self._names.namespace).socket
                asked = self._asked(PUBLISH_BEGIN, begin.to_args())
                break
            except NotRunningError as error:
                if deadline.expired():
                    command = f"ftd start --namespace {self._names.namespace} --receive"
                    raise NotRunningError(error.message, command) from None
            except ControlError:  # it ends, or does not listen yet
                if deadline.expired():
                    raise
            deadline.pause(_POLL_S)
        with asked:
            return Staging.from_result(self._reply(asked))

    def _send(self, staging: Staging, memory: torch.Tensor, cargo: Cargo) -> None:
        """Every lane has one thread, which fills a slot while the daemon copies the other."""
        queue = deque(batches(cargo))  # popleft is atomic
        lanes = min(staging.lanes, len(queue))
        if not lanes:
            return
        slots = memory.view(staging.lanes, staging.slots, staging.slot_bytes)
        with ThreadPoolExecutor(lanes, thread_name_prefix="ftd-publish") as pool:
            try:
                for future in [
                    pool.submit(self._work, queue, staging.token, number, slots[number], cargo)
                    for number in range(lanes)
                ]:
                    future.result()
            except BaseException:
                self._stop.set()
                raise

    def _work(self, queue: deque[list[Piece]], token: bytes, number: int, slots: torch.Tensor, cargo: Cargo) -> None:
        try:
            with LaneOut(self._socket, token, number, Deadline.after(_SEND_S)) as lane:
                self._lanes.append(lane)
                turns = itertools.cycle(slots)
                digester = PieceDigester()
                for portion in portions(itertools.chain.from_iterable(_drained(queue)), slots.shape[1]):
                    if not self._freed(lane):
                        break
                    views = fill(next(turns), portion, cargo.tensors)
                    lane.put(_told(portion, views, digester), Deadline.after(_SEND_S))
                else:
                    lane.put((), Deadline.after(_SEND_S))
                    while self._freed(lane):
                        pass
                if not self._stop.is_set():
                    lane.reply(Deadline.after(_SEND_S))
        except BaseException:
            self._stop.set()
            raise

    def _freed(self, lane: LaneOut) -> bool:
        """Waits for a slot; False where there comes none: the lane has its answer, or another one failed."""
        while not self._stop.is_set():
            if lane.answered(_LOOK_S):
                return lane.freed()
            self._check()
        return False

    def reason(self, error: FtdError) -> FtdError:
        """Why the publication failed, where `error` only says that it did."""
        vague = isinstance(error, PublishRefusedError | ControlError)
        if self._life is not None and vague and self._life.answered(_LOOK_S):
            try:
                self._life.reply(Deadline.after(_SEND_S))
            except FtdError as said:
                return said
        return error

    def _ask(self, op: str, args: Mapping[str, Any]) -> dict[str, Any]:
        with self._asked(op, args) as asked:
            return self._reply(asked)

    def _asked(self, op: str, args: Mapping[str, Any]) -> Asked:
        return Asked(self._socket, op, args, Deadline.after(_SEND_S))

    def _reply(self, asked: Asked) -> dict[str, Any]:
        """The answer, however long it takes, while the daemon makes progress."""
        while not asked.answered(_LOOK_S):
            self._check()
        return asked.reply(Deadline.after(_SEND_S))

    def _check(self) -> None:
        """
        Raises:
            CreatorHungError: the daemon makes no progress.
        """
        seen = observe(self._names)
        if seen.state is State.HUNG:
            name = self._names.namespace
            raise CreatorHungError(
                f"the daemon of {name!r} is hung: its heartbeat is {seen.heartbeat_age_s:.1f} s old",
                f"ftd start --namespace {name} --receive --replace",
            )

    def after_fork(self) -> None:
        for asked in self._lanes if self._life is None else (self._life, *self._lanes):
            asked.close()

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._life is not None:
            self._life.close()


def _drained(queue: deque[list[Piece]]) -> Iterator[list[Piece]]:
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


def _told(portion: Sequence[Piece], views: Sequence[memoryview], digester: PieceDigester) -> tuple[Part, ...]:
    """What lies in a slot.

    Args:
        digester: of the piece that is not whole yet.
    """
    parts = []
    for piece, data in zip(portion, views, strict=True):
        digester.update(data)
        digest = b""
        if piece.ends:
            digest = digester.digest()
            digester.reset()
        parts.append(Part(piece.tensor, piece.offset, piece.nbytes, digest))
    return tuple(parts)


def _open(staging: Staging) -> torch.Tensor:
    """`uint8[staging.nbytes] @cpu`: the staging segment."""
    segment = Segment.open(staging.name, writable=True)
    if segment is None:
        raise SegmentError(f"{staging.name} is gone: expected the staging segment", "containers must share /dev/shm")
    with segment:
        if (segment.inode, segment.size) != (staging.inode, staging.nbytes):
            raise SegmentError(f"{staging.name} is another segment than the daemon's", "containers must share /dev/shm")
        return torch.frombuffer(segment.map_shared(writable=True, huge=True), dtype=torch.uint8)


@contextlib.contextmanager
def _pinned(memory: torch.Tensor, cargo: Cargo) -> Iterator[None]:
    """Page-locks the staging segment where tensors come from a GPU: copies to it are several times as fast then."""
    cuda, reason = load_runtime() if any(tensor.is_cuda for tensor in cargo.tensors) else (None, "no tensor needs it")
    if cuda is None:
        log.debug("the staging segment is not page-locked: %s", reason)
        yield
        return
    pinned = register(cuda, [Region(memory.data_ptr(), memory.numel())])
    for text in pinned.warnings:
        log.debug("%s", text)
    try:
        yield
    finally:
        pinned.close()


def _synchronize(cargo: Cargo) -> None:
    """Waits for what this process has queued: slots are filled by other threads, on streams of their own."""
    for device in {tensor.device for tensor in cargo.tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
