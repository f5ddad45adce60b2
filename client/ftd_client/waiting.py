"""Waiting for a creator to be ready: bounded, and ended at once by what cannot get better."""

from __future__ import annotations

import os

from ftd import failures, rundir
from ftd.clock import Deadline, monotonic_ns
from ftd.errors import (
    AttachTimeoutError,
    CreatorDiedError,
    CreatorFailedError,
    CreatorHungError,
    FtdError,
    NoCreatorError,
)
from ftd.shm.coord import CoordReader, CoordRecord, Observation
from ftd.shm.names import Names
from ftd.shm.state import State
from ftd.units import format_bytes
from ftd.wire.client import call
from ftd_client.queueing import one_at_a_time
from ftd_client.trust import check_owner

_POLL_S = 0.02
_ASK_S = 1.0


class Waiter:
    """One wait, from the call of `attach` to a ready creator.

    A creator is watched through the block it was first seen in: when the name moves on, its last words can still be
    read there.
    """

    def __init__(self, names: Names, timeout_s: float | None) -> None:
        self._names = names
        self._timeout_s = timeout_s
        # 0 and None: no creator raises at once, a living one is waited for as long as it lives
        self._deadline = Deadline.after(timeout_s or None)
        self._begun_ns = monotonic_ns()
        self._reader: CoordReader | None = None
        self._alive: Observation | None = None  # the last look at a creator that lived

    def ready(self) -> tuple[CoordReader, CoordRecord]:
        """The block of a ready creator, which the caller closes, and what it says.

        Raises:
            NoCreatorError, CreatorFailedError, CreatorDiedError, CreatorHungError, AttachTimeoutError,
            ProtocolMismatchError, AccessError: as `attach` says.
        """
        try:
            while True:
                with one_at_a_time():
                    seen = self._look()
                if seen is not None and seen.record is not None and seen.state is State.READY:
                    reader, self._reader = self._reader, None
                    if reader is not None:
                        return reader, seen.record
                self._judge(seen)
                if self._deadline.expired():
                    raise self._too_late(seen)
                self._deadline.pause(_POLL_S)
        finally:
            self._drop()

    def _look(self) -> Observation | None:
        """A look at the creator; None where there is none. Raises what a creator that just ended left to say."""
        if self._reader is not None and not self._reader.is_named():
            self._after(self._reader.look())
            self._drop()
        if self._reader is None:
            self._reader = CoordReader.open(self._names)
        if self._reader is None:
            return None
        seen = self._reader.look()
        if seen.owner_uid is not None:
            check_owner(self._names.namespace, seen.owner_uid, os.environ)
        if seen.problem is not None and seen.locked:
            raise seen.problem
        if not seen.locked:
            self._after(seen)
            self._drop()  # a leftover: the next creator replaces the block
            return None
        self._alive = seen
        return seen

    def _judge(self, seen: Observation | None) -> None:
        """Raises where waiting is of no use."""
        if seen is not None and seen.state is State.FAILED and seen.record is not None:
            raise self._failed(seen.record.failure or {})
        if seen is not None and seen.state is State.HUNG:
            who = f" (pid {seen.record.owner.pid})" if seen.record else ""
            silent = f"its heartbeat is {seen.heartbeat_age_s:.1f} s old" if seen.record else "it has not said a word"
            raise CreatorHungError(
                f"the creator of {self._names.namespace!r}{who} is hung: {silent}",
                f"ftd start --namespace {self._names.namespace} --replace",
            )
        if seen is None and self._alive is None:
            failure = self._recorded()
            if failure is not None and (failure.is_after(self._begun_ns) or not self._timeout_s):
                raise self._failed(failure.to_dict())
            if not self._timeout_s:
                raise self._nobody()

    def _after(self, last: Observation) -> None:
        """What the end of a creator means, given the last look at its block."""
        alive, self._alive = self._alive, None
        if alive is None:
            return  # it was dead when this wait began
        record = last.record or alive.record
        if record is not None and record.failure is not None:
            raise self._failed(record.failure)
        failure = self._recorded()
        if failure is not None and failure.is_after(self._begun_ns):
            raise self._failed(failure.to_dict())
        if record is not None and record.generation:
            return  # it had published, if only between two looks: wait for the next one
        stopped = record is not None and record.state in (State.DRAINING, State.STOPPED)
        pid = f" (pid {record.owner.pid})" if record else ""
        raise CreatorDiedError(
            f"the creator of {self._names.namespace!r}{pid} {'was stopped' if stopped else 'died'} while it loaded",
            f"ftd start --namespace {self._names.namespace}",
        )

    def _recorded(self) -> failures.Failure | None:
        """Why the last start failed, as far as a runtime directory tells."""
        return failures.read_failure(rundir.client_dirs(os.environ), self._names.namespace)

    def _failed(self, failure: dict[str, str]) -> CreatorFailedError:
        said = f"{failure.get('message', 'it gave no reason')} [{failure.get('code', '?')}]"
        return CreatorFailedError(f"the creator of {self._names.namespace!r} failed: {said}", failure.get("remedy", ""))

    def _too_late(self, seen: Observation | None) -> FtdError:
        if seen is None or seen.record is None:
            failure = self._recorded()
            return self._failed(failure.to_dict()) if failure and seen is None else self._nobody()
        progress = seen.record.progress
        return AttachTimeoutError(
            f"{self._names.namespace!r} is still {seen.state} after {self._timeout_s:g} s:"
            f" {format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)} are loaded",
            "attach with a longer timeout, or with None to wait as long as the creator lives",
        )

    def _nobody(self) -> NoCreatorError:
        namespace = self._names.namespace
        waited = f" within {self._timeout_s:g} s" if self._timeout_s else ""
        for folder in rundir.client_dirs(os.environ):
            try:
                path = rundir.socket_path(folder, namespace)
                call(path, "status", {}, Deadline.after(_ASK_S))
            except FtdError:
                continue
            return NoCreatorError(
                f"a daemon answers at {path}, but its segments are not visible in this /dev/shm: it lives behind"
                " another mount",
                "share /dev/shm with it: in docker --ipc=host or -v /dev/shm:/dev/shm, in a pod one emptyDir",
            )
        return NoCreatorError(
            f"no creator of namespace {namespace!r} was found{waited}",
            f"ftd start --namespace {namespace} --model <path>",
        )

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
