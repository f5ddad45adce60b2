"""`ftd start`: the composition root of the daemon. Takes the namespace, reads the configuration, serves, cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftd import failures, rundir
from ftd.clock import NS, monotonic_ns
from ftd.config.load import load_daemon_config, render_origins
from ftd.config.model import DaemonConfig
from ftd.daemon.followers import next_generation
from ftd.daemon.logs import DETACHED_LOG
from ftd.daemon.notify import Notifier
from ftd.daemon.serve import Service
from ftd.daemon.signals import StopSignals
from ftd.errors import AlreadyRunningError, ConfigError, FtdError, InternalError
from ftd.owner import Owner
from ftd.shm import slots
from ftd.shm.coord import CoordRecord, CoordWriter, observe
from ftd.shm.life import LifeLock
from ftd.shm.names import Names
from ftd.shm.segment import Access
from ftd.shm.state import State

log = logging.getLogger("ftd")


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What the command line says."""

    namespace: str
    model: Path | None = None
    config_file: Path | None = None
    sets: Sequence[str] = ()


def run(options: StartOptions, environ: Mapping[str, str], signals: StopSignals) -> None:
    """Serves the namespace until a signal or `stop` ends it; nothing is left behind.

    The life lock comes before the configuration: only its holder may say why the last start failed.

    Raises:
        AlreadyRunningError: another creator holds the namespace.
        FtdError: anything else that prevents it; the reason is kept for `status` and `attach`.
    """
    names = Names(options.namespace)
    notifier = Notifier.from_environ(environ)
    try:
        directory = rundir.daemon_dir(environ)
        with LifeLock.acquire(names) as life:
            try:
                failures.remove_failure(rundir.client_dirs(environ), names.namespace)
                if DETACHED_LOG in environ:
                    _empty_log(Path(environ[DETACHED_LOG]))
                socket = rundir.socket_path(directory, names.namespace)
                config = _configure(options, environ)
                _serve(life, config, socket, notifier, signals)
            except BaseException as error:
                _record_failure(directory, names, error)
                _clean_up(life, failed=True)
                raise
            if DETACHED_LOG in environ:
                Path(environ[DETACHED_LOG]).unlink(missing_ok=True)  # while it cannot be the next daemon's yet
            _clean_up(life, failed=False)
    except FtdError as error:
        notifier.failed(error)
        raise


def _empty_log(path: Path) -> None:
    """Only once the namespace is held: until then it is the log of whoever held it."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)


def _configure(options: StartOptions, environ: Mapping[str, str]) -> DaemonConfig:
    loaded = load_daemon_config(
        options.namespace, config_file=options.config_file, sets=options.sets, model=options.model, environ=environ
    )
    for text in loaded.warnings:
        log.warning(text)
    for key, value, origin in render_origins(loaded):
        log.debug("configuration: %s = %s (%s)", key, value, origin)
    return loaded.config


def _serve(life: LifeLock, config: DaemonConfig, socket: Path, notifier: Notifier, signals: StopSignals) -> None:
    names = life.names
    access = Access(config.mode, _gid(config.group))
    generation = next_generation(names, _last_generation(names))
    slots.prepare(names, access)
    now = monotonic_ns()
    coord = CoordWriter(
        names,
        access,
        CoordRecord(
            owner=Owner.current(),
            state=State.LOADING,
            generation=0,
            heartbeat_ns=now,
            heartbeat_interval_ns=int(config.heartbeat_s * NS),
            hung_after_ns=int(config.lease_timeout_s * NS),
            started_ns=now,
            socket=str(socket),
        ),
    )
    try:
        asyncio.run(Service(life, coord, config, access, generation, socket, notifier).run(signals))
    except FtdError as error:
        _say(coord, error)
        raise
    except Exception as error:
        _say(coord, _internal(error))
        raise
    finally:
        coord.unlink()
        coord.close()


def _say(coord: CoordWriter, error: FtdError) -> None:
    """The last word, for followers that wait: they hold the block and read it once more when its lock is gone."""
    try:
        coord.fail(error)
    except (FtdError, OSError) as refused:
        log.debug("the failure could not be written to the coordination block: %s", refused)


def _last_generation(names: Names) -> int:
    try:
        record = observe(names).record
    except FtdError:
        return 0
    return record.generation if record else 0


def _gid(group: str | int | None) -> int | None:
    if group is None or isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"group: {group!r} is no group of this host", "create it, or give a numeric gid") from None


def _record_failure(directory: Path, names: Names, error: BaseException) -> None:
    if not isinstance(error, Exception) or isinstance(error, AlreadyRunningError):
        return  # that another daemon answers at the socket is no failure of the namespace
    reason = error if isinstance(error, FtdError) else _internal(error)
    failures.write_failure(directory, failures.Failure.of(names.namespace, reason))


def _internal(error: BaseException) -> InternalError:
    return InternalError(f"unexpected {type(error).__name__}: {error}", "please report this, with the log")


def _clean_up(life: LifeLock, *, failed: bool) -> None:
    """Removes every name. After a failure those that followers of an earlier generation hold stay, with their
    leases: the next start names their holders, or finds them gone."""
    if not life.is_named():
        # somebody removed the lock's name: whoever holds that name now decides, which may be us once more
        with contextlib.suppress(AlreadyRunningError), LifeLock.acquire(life.names) as again:
            _clean_up(again, failed=failed)
        return
    held = slots.holders(life.names) if failed else []
    if held:
        life.sweep(slots.generations_in_use(held))
        life.remove_lock()
    else:
        life.sweep_all()
