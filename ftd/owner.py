"""Who a process is, in a way that a recycled pid cannot fake.

A pid alone identifies nothing: it is reused, and means nothing in another pid namespace or after a reboot.
(boot id, pid namespace, pid, start ticks) does. Nothing here decides whether a creator or follower lives (locks
do): it serves people, who read pids, and `stop --force`, which must not kill a stranger.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """Identity of a process.

    Attributes:
        boot_id: 16 bytes of /proc/sys/kernel/random/boot_id.
        pid_namespace: inode of /proc/self/ns/pid.
        pid: as seen inside `pid_namespace`.
        start_ticks: field 22 of /proc/<pid>/stat, clock ticks since boot.
        uid: effective user id.
    """

    boot_id: bytes
    pid_namespace: int
    pid: int
    start_ticks: int
    uid: int

    @staticmethod
    def current() -> Owner:
        """The calling process."""
        return Owner(boot_id(), *_birth(os.getpid()), os.geteuid())

    def is_running(self) -> bool | None:
        """Whether this very process still runs; None where that cannot be told from here."""
        if self.boot_id != boot_id():
            return False
        if self.pid_namespace != _pid_namespace():
            return None
        return start_ticks(self.pid) == self.start_ticks

    def has_ended(self) -> bool | None:
        """Whether all threads of this process are gone, and with them its files and what devices did for it; None
        where that cannot be told from here. A killed process takes a while, and is a zombie before all of it is.
        """
        if self.boot_id != boot_id():
            return True
        if self.pid_namespace != _pid_namespace():
            return None
        try:
            os.kill(self.pid, 0)  # also where /proc hides the processes of others
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        if start_ticks(self.pid) not in (None, self.start_ticks):
            return True  # another one
        try:
            # only the first thread stays as a zombie; it may be one while others run
            return start_ticks(self.pid) is None and len(list(Path(f"/proc/{self.pid}/task").iterdir())) == 1
        except OSError:
            return None


@functools.cache
def boot_id() -> bytes:
    """16 bytes that name this boot of the machine."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


@functools.cache
def _birth(pid: int) -> tuple[int, int, int]:
    """Of the calling process, which keeps all three: pid namespace, pid, start ticks."""
    return _pid_namespace(), pid, start_ticks(pid) or 0


os.register_at_fork(after_in_child=_birth.cache_clear)  # a pid may come again


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it does not run or is only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # the command name may hold spaces and brackets: fields count from the last bracket
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def process_name(pid: int) -> str:
    """Command name of a process, for messages; `"?"` when it cannot be read."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def uid_of(pid: int) -> int | None:
    """Effective user of a running process; None when there is none."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Name of a user, for messages."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """Name of a group, for messages."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
