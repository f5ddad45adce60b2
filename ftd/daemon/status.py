"""What `ftd status` says: shared memory looked at from outside, and a bounded round trip to the daemon.

Nothing here trusts the daemon to be well: its state is judged from its lock and heartbeat, its segments are looked up
by name, and it must answer on its socket. Imports neither torch nor asyncio nor pydantic: it runs in every health
check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ftd import failures, rundir
from ftd._version import PROTOCOL, __version__
from ftd.clock import NS, Deadline, monotonic_ns
from ftd.daemon import leftovers
from ftd.daemon.answer import checked
from ftd.errors import (
    EXIT_FAILED,
    EXIT_NOT_READY,
    EXIT_NOT_RUNNING,
    EXIT_OK,
    AccessError,
    CreatorHungError,
    FtdError,
    SegmentError,
)
from ftd.shm.coord import CoordRecord, Observation, Progress, observe
from ftd.shm.life import is_held
from ftd.shm.manifest import MAX_MANIFEST_BYTES, digest_of, read_segment
from ftd.shm.names import Names, listed
from ftd.shm.segment import inode_of, path_of
from ftd.shm.slots import Holder, holders
from ftd.shm.state import State
from ftd.wire.client import call

#: A status answers within 2 s whatever the daemon does; this much of it is for the round trip.
ROUND_TRIP_S = 1.0
_LIST_THREADS = 32
_POLL_S = 0.05
_FOLLOWER_FIELDS = (
    "pid", "state", "device", "generation", "attached_s", "heartbeat_age_s", "planned_bytes", "resident_bytes",
    "streamed_bytes", "pinned_bytes", "pin",
)  # fmt: skip

EXIT_BY_STATE = {
    State.READY: EXIT_OK,
    State.LOADING: EXIT_NOT_READY,
    State.DRAINING: EXIT_NOT_READY,
    State.STOPPED: EXIT_NOT_RUNNING,
    State.FAILED: EXIT_FAILED,
    State.HUNG: EXIT_FAILED,
}


def namespaces(environ: Mapping[str, str]) -> list[str]:
    """Every namespace of this host that has segments or a recorded failure."""
    found = {name.namespace for name in listed()}
    return sorted(found | set(failures.failed_namespaces(rundir.client_dirs(environ))))


def exit_status(reports: Sequence[Mapping[str, Any]], *, one: bool) -> int:
    """Of one namespace: by its state. Of a list: 0 unless something failed or hung, as far as this user may look."""
    if one:
        return EXIT_BY_STATE[State(reports[0]["state"])]
    return EXIT_FAILED if any(r["state"] in (State.FAILED, State.HUNG) for r in reports) else EXIT_OK


def report(namespace: str, environ: Mapping[str, str], round_trip_s: float = ROUND_TRIP_S) -> dict[str, Any]:
    """The status object of the contract.

    Raises:
        NamespaceError: the name is not valid.
        AccessError: this user may not look at the namespace.
    """
    shown = _judged(Names(namespace), environ, round_trip_s)
    for segment in shown["segments"]:
        segment.pop("inode", None)  # told for the checks; not of the contract
    shown["warnings"] += leftovers.of_others(Names(namespace))
    return shown


def _judged(names: Names, environ: Mapping[str, str], round_trip_s: float) -> dict[str, Any]:
    """One look, and another where the daemon moved on under it: one that has just ended is not hung."""
    deadline = Deadline.after(round_trip_s)
    while True:
        seen = observe(names)
        shown = _look(names, seen, environ, deadline)
        well = shown["state"] not in (State.HUNG, State.FAILED)
        if well or deadline.expired() or _moment(seen) == _moment(observe(names)):
            return shown


def _moment(seen: Observation) -> tuple[object, ...]:
    record = seen.record
    return (seen.inode, seen.locked, record and (record.owner, record.state, record.generation))


def _look(names: Names, seen: Observation, environ: Mapping[str, str], deadline: Deadline) -> dict[str, Any]:
    if not seen.locked:
        return _unnamed(names, environ, deadline) or _not_running(names, seen, environ)
    shown = _seen(names, seen)
    if seen.record is None:
        if seen.problem is not None:
            shown["state"], shown["failure"] = State.FAILED.value, seen.problem.to_dict()
        return shown
    if shown["state"] != State.DRAINING:  # its socket goes first
        _ask(names, shown, seen.record, environ, deadline)
    if shown["state"] == State.READY:
        _verify(shown, names, seen.record)
    return shown


def _empty(namespace: str, state: State | None) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "state": state and state.value,
        "stage": None,
        "pid": None,
        "uptime_s": None,
        "heartbeat_age_s": None,
        "generation": None,
        "fingerprint": None,
        "model": None,
        "segments": [],
        "progress": {"bytes_done": 0, "bytes_total": 0, "bytes_per_s": 0.0, "eta_s": None},
        "followers": [],
        "pin": "none",
        "push": [],
        "push_obstacle": None,
        "failure": None,
        "warnings": [],
        "versions": {"ftd": __version__, "protocol": ".".join(map(str, PROTOCOL)), "torch": None},
    }


def _seen(names: Names, seen: Observation) -> dict[str, Any]:
    """The part that shared memory shows."""
    shown = _empty(names.namespace, seen.state or State.STOPPED)
    record = seen.record
    if record is None:
        return shown
    now = monotonic_ns()
    shown |= {
        "pid": record.owner.pid,
        "uptime_s": round((now - record.started_ns) / NS, 3),
        "heartbeat_age_s": round(seen.heartbeat_age_s or 0.0, 3),
        "generation": record.generation or None,
        "progress": _progress(record.progress, now),
        "followers": [_follower(h, now, record.hung_after_ns) for h in holders(names)],
        "failure": _plain_failure(record.failure),
    }
    shown["versions"]["ftd"] = record.version
    if seen.state is State.HUNG:
        error = CreatorHungError(
            f"the heartbeat is {seen.heartbeat_age_s:.1f} s old: expected one every"
            f" {record.heartbeat_interval_ns / NS:g} s",
            f"ftd start --namespace {names.namespace} --replace",
        )
        shown["failure"] = error.to_dict()
    return shown


def _ask(
    names: Names, shown: dict[str, Any], record: CoordRecord, environ: Mapping[str, str], deadline: Deadline
) -> None:
    """Fills in what only the daemon knows; a ready daemon that does not answer is hung."""
    try:
        path = find_socket(record, environ)
        shown |= checked(names, call(path, "status", {}, deadline), path)
    except FtdError as error:
        shown["warnings"].append(error.message)
        if shown["state"] == State.READY:
            shown["state"], shown["failure"] = State.HUNG.value, error.to_dict()


def _unnamed(names: Names, environ: Mapping[str, str], deadline: Deadline) -> dict[str, Any] | None:
    """The status of a daemon that lives without a coordination block to be seen; None where none does."""
    found = answering_socket(names, environ, deadline)
    if found is not None:
        path, answer = found
        error = SegmentError(
            f"a daemon answers at {path}, but {path_of(names.coord)} is gone: somebody removed it, or that daemon"
            " lives behind another mount",
            f"ftd stop --namespace {names.namespace}, then start it again; containers must share /dev/shm",
        )
        return _empty(names.namespace, State.FAILED) | answer | {"failure": error.to_dict()}
    with contextlib.suppress(AccessError):  # of another user: what it left, since his daemon would hold the block
        if is_held(names):
            return _empty(names.namespace, State.LOADING)  # the moment between the lock and the block
    return None


def answering_socket(
    names: Names, environ: Mapping[str, str], deadline: Deadline
) -> tuple[Path, dict[str, Any]] | None:
    """The socket at which a daemon of the namespace answers, whatever shared memory shows, and its status."""
    for folder in rundir.client_dirs(environ):
        with contextlib.suppress(FtdError):
            path = rundir.socket_path(folder, names.namespace)
            return path, checked(names, call(path, "status", {}, deadline), path)
    return None


def find_socket(record: CoordRecord, environ: Mapping[str, str]) -> Path:
    return rundir.find_socket(Path(record.socket), environ)


def _verify(shown: dict[str, Any], names: Names, record: CoordRecord) -> None:
    """A ready namespace must be one that a new follower could attach to now."""
    try:
        for segment in shown["segments"]:
            _verify_segment(segment)
        for fixed in (names.slots, names.lock):
            if inode_of(fixed) is None:
                raise SegmentError(f"{path_of(fixed)} is gone", "restart the daemon")
        if not _holds_lock(names):
            raise SegmentError(f"{path_of(names.lock)} is not the one that the daemon holds", "restart the daemon")
        data = read_segment(names.manifest(record.generation), MAX_MANIFEST_BYTES)
        if data is None:
            raise SegmentError(f"{path_of(names.manifest(record.generation))} is gone", "restart the daemon")
        if digest_of(data) != record.manifest_digest:
            raise SegmentError(
                f"{path_of(names.manifest(record.generation))} is not what was published: its checksum differs",
                "restart the daemon",
            )
    except FtdError as error:
        shown["state"], shown["failure"] = State.FAILED.value, error.to_dict()


def _verify_segment(segment: Mapping[str, Any]) -> None:
    path = path_of(segment["name"])
    try:
        facts = path.stat()
    except FileNotFoundError:
        raise SegmentError(f"{path} is gone", "restart the daemon") from None
    for what, found, expected in (
        ("inode", facts.st_ino, segment["inode"]),
        ("bytes", facts.st_size, segment["bytes"]),
    ):
        if found != expected:
            raise SegmentError(f"{path} has {what} {found}: expected {expected}", "restart the daemon")


def _holds_lock(names: Names) -> bool:
    try:
        return is_held(names)
    except AccessError:
        return True  # only its user may look


def _not_running(names: Names, seen: Observation, environ: Mapping[str, str]) -> dict[str, Any]:
    failure = failures.read_failure(rundir.client_dirs(environ), names.namespace)
    record = seen.record
    said = _plain_failure(record.failure) if record else None
    shown = _empty(names.namespace, State.FAILED if failure or said else State.STOPPED)
    if failure:
        shown["failure"] = {"code": failure.code, "message": failure.message, "remedy": failure.remedy}
    elif said:
        shown["failure"] = said
    held = holders(names)
    shown["followers"] = [_follower(h, monotonic_ns(), None) for h in held]
    shown["warnings"] += leftovers.of_the_dead(names, record, held)
    return shown


def _plain_failure(failure: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {key: failure[key] for key in ("code", "message", "remedy")} if failure else None


def _progress(progress: Progress, now: int) -> dict[str, Any]:
    seconds = ((progress.ended_ns or now) - progress.started_ns) / NS if progress.started_ns else 0.0
    rate = progress.bytes_done / seconds if seconds > 0 else 0.0
    left = progress.bytes_total - progress.bytes_done
    return {
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "bytes_per_s": round(rate, 1),
        "eta_s": 0.0 if progress.ended_ns else round(left / rate, 3) if rate else None,
    }


def _follower(holder: Holder, now: int, hung_after_ns: int | None) -> dict[str, Any]:
    record = holder.record
    if record is None:
        return dict.fromkeys(_FOLLOWER_FIELDS) | {"state": "unknown"}
    age_ns = max(0, now - record.heartbeat_ns)
    late = hung_after_ns is not None and age_ns > hung_after_ns
    shown = asdict(replace(record, state=State.HUNG.value if late else record.state))
    for key in ("owner", "attached_ns", "heartbeat_ns"):
        del shown[key]
    return {
        "pid": record.owner.pid,
        **shown,
        "attached_s": round((now - record.attached_ns) / NS, 3),
        "heartbeat_age_s": round(age_ns / NS, 3),
    }


def report_all(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """A status object for every namespace. One that this user may not look at has no state, only a warning."""

    def one(namespace: str) -> dict[str, Any]:
        try:
            return report(namespace, environ)
        except AccessError as error:
            # any of the six words would be a guess, and `failed` an alarm about what may be well
            return _empty(namespace, None) | {"warnings": [error.message]}
        except FtdError as error:
            return _empty(namespace, State.FAILED) | {"failure": error.to_dict()}

    from concurrent.futures import ThreadPoolExecutor  # 5 ms that the health check of one namespace need not pay

    # side by side: every namespace that hangs costs a whole round trip
    with ThreadPoolExecutor(_LIST_THREADS) as pool:
        return list(pool.map(one, namespaces(environ)))


def report_when_ready(namespace: str, environ: Mapping[str, str], wait_s: float | None) -> dict[str, Any]:
    """The status object, at once or as soon as the namespace is ready, failed for good, or `wait_s` is over."""
    deadline = Deadline.after(wait_s or 0.0)
    names = Names(namespace)
    begun_ns = monotonic_ns()
    while not deadline.expired():
        seen = observe(names)
        if seen.state in (State.READY, State.HUNG) or (seen.state is State.FAILED and seen.locked):
            break
        if not seen.locked and _failed_since(begun_ns, namespace, environ):
            break
        deadline.pause(_POLL_S)
    return report(namespace, environ)


def _failed_since(begun_ns: int, namespace: str, environ: Mapping[str, str]) -> bool:
    failure = failures.read_failure(rundir.client_dirs(environ), namespace)
    return failure is not None and failure.is_after(begun_ns)
