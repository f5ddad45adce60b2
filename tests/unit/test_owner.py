import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftd import owner as owner_module
from ftd.clock import Deadline
from ftd.owner import Owner, boot_id, group_name, process_name, start_ticks, uid_of, user_name
from tests.conftest import NOBODY, kill

Standing = Callable[[Callable[[], Any]], int]


def test_the_calling_process_runs() -> None:
    me = Owner.current()
    assert (me.pid, me.uid, me.boot_id) == (os.getpid(), os.geteuid(), boot_id())
    assert me.start_ticks > 0
    assert me.is_running() is True


def test_the_same_process_has_the_same_identity_at_every_look() -> None:
    assert Owner.current() == Owner.current()


def test_a_recycled_pid_is_another_process() -> None:
    assert replace(Owner.current(), start_ticks=Owner.current().start_ticks - 1).is_running() is False


def test_after_a_reboot_nobody_runs() -> None:
    assert replace(Owner.current(), boot_id=bytes(16)).is_running() is False


def test_a_pid_of_another_namespace_cannot_be_judged() -> None:
    assert replace(Owner.current(), pid_namespace=1).is_running() is None


def test_a_reboot_is_seen_from_every_pid_namespace() -> None:
    assert replace(Owner.current(), pid_namespace=1, boot_id=bytes(16)).is_running() is False


def test_a_killed_child_runs_no_more(standing: Standing) -> None:
    pid = standing(lambda: None)
    child = replace(Owner.current(), pid=pid, start_ticks=start_ticks(pid) or 0)
    assert child.is_running() is True
    kill(pid)
    assert child.is_running() is False


def test_a_zombie_runs_no_more() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its entry is still there
    assert os.path.exists(f"/proc/{pid}/stat")
    assert start_ticks(pid) is None
    os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["a b", ") 7 S (", "((("])
def test_any_command_name_can_be_read(name: str, in_child: Callable[..., Any]) -> None:
    """The name stands in the middle of /proc/<pid>/stat, brackets and spaces included."""

    def renamed() -> tuple[Owner, str, bool | None]:
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)
        return Owner.current(), process_name(os.getpid()), Owner.current().is_running()

    child, shown, running = in_child(renamed)
    assert shown == name
    assert running is True
    assert child.start_ticks >= Owner.current().start_ticks


def test_nobody_has_no_name() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert process_name(pid) == "?"
    assert start_ticks(pid) is None


def test_whose_a_process_is(in_child: Callable[..., Any]) -> None:
    assert uid_of(os.getpid()) == os.geteuid()
    assert in_child(lambda: uid_of(os.getpid()), uid=NOBODY) == NOBODY
    assert [uid_of(pid) for pid in (0, -1, 2**63)] == [None] * 3


def test_users_and_groups_without_a_name_are_shown_by_number() -> None:
    assert (user_name(0), group_name(0)) == ("root", "root")
    assert (user_name(54321), group_name(54322)) == ("uid 54321", "gid 54322")


def _child(pid: int) -> Owner:
    return replace(Owner.current(), pid=pid, start_ticks=start_ticks(pid) or 0)


def test_a_living_process_has_not_ended_and_a_killed_one_has(standing: Standing) -> None:
    child = _child(standing(lambda: None))
    assert (Owner.current().has_ended(), child.has_ended()) == (False, False)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.has_ended() is True, "a zombie has no files any more"
    os.waitpid(child.pid, 0)
    assert child.has_ended() is True


def test_a_zombie_has_not_ended_while_a_thread_of_it_runs() -> None:
    """As of a killed daemon whose copying thread is still inside the driver: its context, too, is still there."""
    code = """
import ctypes, os, sys, threading
def stay():
    print("here", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        owner = replace(Owner.current(), pid=process.pid)
        deadline = Deadline.after(20)
        while start_ticks(process.pid) is not None:
            assert not deadline.expired()
            deadline.pause(0.01)
        assert owner.is_running() is False, "so it looks by its first thread"
        assert owner.has_ended() is False
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner.has_ended() is True


def test_whether_another_has_ended_is_not_judged_by_its_pid_alone() -> None:
    me = Owner.current()
    assert replace(me, start_ticks=me.start_ticks - 1).has_ended() is True, "this pid is another's now"
    assert replace(me, boot_id=bytes(16)).has_ended() is True
    assert replace(me, pid_namespace=1).has_ended() is None


def test_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hidepid=2 hides those of other users."""
    monkeypatch.setattr(owner_module, "start_ticks", lambda pid: None)
    monkeypatch.setattr(owner_module, "Path", _Hidden)
    assert not Owner(boot_id(), os.stat("/proc/self/ns/pid").st_ino, 1, 0, 0).has_ended()


class _Hidden(type(Path())):  # type: ignore[misc]
    def iterdir(self) -> Any:
        raise FileNotFoundError(str(self))
