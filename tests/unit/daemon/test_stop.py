"""Whom `stop` may signal, and what it says of what it cannot end."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftd.clock import NS, monotonic_ns
from ftd.daemon.stop import _signal, stop
from ftd.errors import StopTimeoutError
from ftd.owner import Owner, _pid_namespace, boot_id, start_ticks, user_name
from ftd.shm.coord import CoordRecord, CoordWriter, Observation, observe
from ftd.shm.life import LifeLock
from ftd.shm.names import Names
from ftd.shm.segment import Access
from ftd.shm.state import State
from tests.conftest import NOBODY, kill

Standing = Callable[[Callable[[], Any]], int]


def _owner(pid: int) -> Owner:
    """The identity of a process, as anybody can find it out."""
    return Owner(boot_id(), _pid_namespace(), pid, start_ticks(pid) or 0, 0)


def _record(owner: Owner) -> CoordRecord:
    now = monotonic_ns()
    return CoordRecord(owner, State.LOADING, 0, now, NS, 60 * NS, now, "/nowhere/a.sock")


def _seen(owner: Owner, owner_uid: int) -> Observation:
    return Observation(State.LOADING, True, _record(owner), 1, 0.0, None, owner_uid)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_the_process_that_the_block_names_is_signalled(standing: Standing) -> None:
    pid = standing(lambda: None)
    assert _signal(_seen(_owner(pid), os.geteuid()), signal.SIGKILL) is None
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 31, (1 << 64) - 1])
def test_a_pid_that_is_none_is_signalled_to_nobody(pid: int) -> None:
    """0 would be the own group, -1 everybody."""
    assert _signal(_seen(replace(_owner(os.getpid()), pid=pid), os.geteuid()), signal.SIGKILL) is None


def test_a_recycled_pid_is_signalled_to_nobody(standing: Standing) -> None:
    pid = standing(lambda: None)
    owner = _owner(pid)
    assert _signal(_seen(replace(owner, start_ticks=owner.start_ticks - 1), os.geteuid()), signal.SIGSTOP) is None
    assert not _is_stopped(pid)


def test_a_process_of_another_pid_namespace_is_named_and_left_alone(standing: Standing) -> None:
    pid = standing(lambda: None)
    refused = _signal(_seen(replace(_owner(pid), pid_namespace=7), os.geteuid()), signal.SIGSTOP)
    assert refused == "which runs in another pid namespace"
    assert not _is_stopped(pid)


def test_who_forged_a_block_cannot_have_another_users_process_killed(
    names: Names, runtime_dir: Path, standing: Standing
) -> None:
    """Anybody may make a block in /dev/shm, and lock it: it is no more than its owner's word."""
    if os.geteuid() != 0:
        pytest.skip("needs root: another user")
    victim = standing(lambda: None)
    kept: list[CoordWriter] = []

    def forge() -> None:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kept.append(CoordWriter(names, Access(0o644), _record(_owner(victim))))

    forger = standing(forge)
    with pytest.raises(StopTimeoutError) as raised:
        stop(names.namespace, os.environ, timeout_s=0.05, force=True)
    assert f"pid {victim}, a process of root in a block of {user_name(NOBODY)}" in raised.value.message
    assert f"/dev/shm/ftd.{names.namespace}.coord" in raised.value.remedy
    os.kill(victim, 0)
    assert start_ticks(victim) is not None
    kill(forger)
    assert "removed 1 segments" in stop(names.namespace, os.environ, timeout_s=0.05, force=True)


def test_a_start_that_hangs_before_it_has_a_block_can_be_found(
    names: Names, runtime_dir: Path, standing: Standing
) -> None:
    kept: list[LifeLock] = []
    pid = standing(lambda: kept.append(LifeLock.acquire(names)))
    with pytest.raises(StopTimeoutError, match="is held by a process that has not said who it is") as raised:
        stop(names.namespace, os.environ, timeout_s=0.05, force=True)
    assert f"fuser /dev/shm/ftd.{names.namespace}.lock" in raised.value.remedy and "lslocks" in raised.value.remedy
    assert not observe(names).locked
    kill(pid)
    assert "removed" in stop(names.namespace, os.environ, timeout_s=0.05, force=True)
