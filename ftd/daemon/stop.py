"""`ftd stop`: asks the daemon to end, waits for its lock, and with `force` kills it and sweeps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from ftd import failures, rundir
from ftd.clock import Deadline
from ftd.daemon.status import answering_socket, find_socket
from ftd.errors import AccessError, ControlError, FtdError, NotRunningError, RuntimeDirError, StopTimeoutError
from ftd.owner import uid_of, user_name
from ftd.shm.coord import CoordReader, Observation, observe
from ftd.shm.life import LifeLock, is_held
from ftd.shm.names import Names, present
from ftd.shm.segment import path_of
from ftd.units import format_bytes
from ftd.wire.bind import remove_stale
from ftd.wire.client import call

_POLL_S = 0.02
#: The request itself; a daemon that is well answers at once.
_ASK_S = 2.0
#: From SIGKILL to the kernel's release of the lock: unpinning hundreds of GB takes a while.
_KILL_S = 60.0


def stop(namespace: str, environ: Mapping[str, str], *, timeout_s: float, force: bool) -> str:
    """Ends the namespace's daemon; gives a line that says what was done.

    Raises:
        NotRunningError: no daemon lives there; names what a dead one left. With `force` that is removed instead.
        StopTimeoutError: it did not end in `timeout_s` seconds (without `force`).
        AccessError: it belongs to another user.
    """
    names = Names(namespace)
    seen = observe(names)
    deadline = Deadline.after(timeout_s)
    if not seen.locked:
        unnamed = answering_socket(names, environ, Deadline.after(_ASK_S))
        if unnamed is not None:
            return _stop_unnamed(names, unnamed[0], deadline)
        if not is_held(names):
            return _sweep_dead(names, environ, force=force)
    asked = _ask(seen, environ, deadline)
    if _wait_gone(names, deadline):
        return f"{namespace}: stopped"
    if not force:
        detail = f": {asked.message}" if asked else ""
        raise StopTimeoutError(
            f"{namespace} did not end within {timeout_s:g} s{detail}",
            f"ftd stop --namespace {namespace} --force, which kills it",
        )
    return f"{_kill(names)}; {_sweep(names, rundir.client_dirs(environ))}"


def _stop_unnamed(names: Names, socket: Path, deadline: Deadline) -> str:
    """Ends a daemon whose segments are not to be seen from here; its socket alone tells when it is gone."""
    call(socket, "stop", {}, Deadline.after(_ASK_S))
    while socket.exists():
        if deadline.expired():
            raise StopTimeoutError(
                f"{names.namespace} did not end in time: {socket} is still there, and its segments are not to be seen",
                "find the daemon with: fuser, ss -xlp",
            )
        deadline.pause(_POLL_S)
    return f"{names.namespace}: stopped"


def _ask(seen: Observation, environ: Mapping[str, str], deadline: Deadline) -> FtdError | None:
    """Asks politely: by the socket, else by SIGTERM; the reason when the socket gave no answer."""
    if seen.record is None:
        return ControlError("it has not said yet where its socket is")
    try:
        until = Deadline.after(min(_ASK_S, deadline.remaining_s() or 0.0))
        call(find_socket(seen.record, environ), "stop", {}, until)
    except ControlError as error:
        _signal(seen, signal.SIGTERM)
        return error
    return None


def _wait_gone(names: Names, deadline: Deadline) -> bool:
    """Whether the creator's lock on the block that has the name now was released in time."""
    reader = CoordReader.open(names)
    try:
        while reader is not None and reader.look().locked:
            if deadline.expired():
                return False
            deadline.pause(_POLL_S)
        while is_held(names):
            if deadline.expired():
                return False
            deadline.pause(_POLL_S)
    finally:
        if reader is not None:
            reader.close()
    return True


def _kill(names: Names) -> str:
    seen = observe(names)
    if not seen.locked and not is_held(names):
        return f"{names.namespace}: ended by itself"
    if not seen.locked or seen.record is None:
        # stopped before it had a block, or before it wrote into it
        block = names.coord if seen.locked else names.lock
        raise StopTimeoutError(
            f"{names.namespace} is held by a process that has not said who it is",
            f"find it with lslocks, or fuser {path_of(block)}, and kill it",
        )
    pid = seen.record.owner.pid
    refused = _signal(seen, signal.SIGKILL)
    if refused is not None:
        raise StopTimeoutError(
            f"{names.namespace} is held by pid {pid}, {refused}: it was not killed",
            f"stop it from its own container, or find who holds {path_of(names.coord)} with lslocks or fuser",
        )
    if not _wait_gone(names, Deadline.after(_KILL_S)):
        raise StopTimeoutError(
            f"pid {pid} was killed but still holds {names.namespace}: the kernel is freeing its memory",
            "wait, then run the command again",
        )
    return f"{names.namespace}: killed pid {pid}"


def _signal(seen: Observation, number: signal.Signals) -> str | None:
    """Signals the very process that the block names, never one that was given its pid since, and never one of a user
    who did not make the block: whoever may write in /dev/shm may make one that names another's process.

    Returns:
        why it was not signalled, as the end of a sentence; None where it was, or is gone.
    """
    if seen.record is None:
        return "which has not said who it is"
    owner = seen.record.owner
    running = owner.is_running()
    if running is None:
        return "which runs in another pid namespace"
    if not running:
        return None
    try:
        fd = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return None  # gone meanwhile
    try:
        # the descriptor is of whoever had the pid when it was opened: ask again who that is
        if owner.is_running():
            uid = uid_of(owner.pid)
            if uid is not None and uid != seen.owner_uid:
                return f"a process of {user_name(uid)} in a block of {user_name(seen.owner_uid or 0)}"
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
    except PermissionError:
        raise AccessError(
            f"pid {owner.pid} may not be signalled by uid {os.geteuid()}: it belongs to uid {owner.uid}",
            "run the command as that user, or with sudo",
        ) from None
    finally:
        os.close(fd)
    return None


def _sweep_dead(names: Names, environ: Mapping[str, str], *, force: bool) -> str:
    """Removes what a dead creator left (with `force`), and the record of why the last start failed."""
    left = present(names).ours
    folders = rundir.client_dirs(environ)
    failed = failures.read_failure(folders, names.namespace)
    if not left and not failed:
        raise NotRunningError(
            f"{names.namespace} is not running", f"ftd start --namespace {names.namespace} --model <path>"
        )
    if left and not force:
        raise NotRunningError(
            f"{names.namespace} is not running; a daemon that died left {', '.join(name.name for name in left)}",
            f"start it again, or ftd stop --namespace {names.namespace} --force to remove them",
        )
    done = _sweep(names, folders)
    if left:
        return f"{names.namespace}: {done}"
    raise NotRunningError(
        f"{names.namespace} is not running: its last start failed, and the record of that is removed now",
        f"ftd start --namespace {names.namespace} --model <path>",
    )


def _sweep(names: Names, folders: list[Path]) -> str:
    with LifeLock.acquire(names, any_owner=True) as life:
        failures.remove_failure(folders, names.namespace)
        for folder in folders:
            with contextlib.suppress(RuntimeDirError):  # too long a path, where no socket can be
                remove_stale(rundir.socket_path(folder, names.namespace))
        removed, freed = life.sweep_all()
    return f"removed {len(removed)} segments, {format_bytes(freed)}"
