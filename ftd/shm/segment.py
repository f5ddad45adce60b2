"""A named segment of POSIX shared memory: the only user of posix_ipc.

The standard library's `multiprocessing.shared_memory` is no choice here: its resource tracker unlinks segments
that a process merely attached to.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from ftd.errors import AccessError, MemoryShortError, SegmentError, os_reason
from ftd.mounts import mounts
from ftd.owner import group_name, user_name
from ftd.shm.names import SHM_DIR
from ftd.units import MIB, format_bytes

PAGE_BYTES = mmap.PAGESIZE
#: Size of a transparent huge page on x86-64 and on arm64 with 4 KiB pages.
HUGE_PAGE_BYTES = 2 * MIB
_REMOVE = "remove what is in the place of a segment"
# <bits/mman-map-flags-generic.h>; Python's mmap module names it from 3.12 on some platforms only
_MAP_NORESERVE = 0x4000


@dataclass(frozen=True, slots=True)
class Access:
    """Permissions that a segment gets, whatever the umask says. `gid` of None keeps the process's group."""

    mode: int = 0o640
    gid: int | None = None

    @property
    def open_mode(self) -> int:
        """`mode`, with writing allowed wherever reading is: taking a lease and connecting to a socket need it."""
        return self.mode | (self.mode & 0o444) >> 1


class Segment:
    """An open descriptor of a segment. Closing it leaves the name and every mapping alone."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = fd

    @staticmethod
    def create(name: str, size: int, access: Access) -> Segment:
        """A new segment of `size` bytes without pages.

        Raises:
            SegmentError: the name exists.
            AccessError: /dev/shm may not be written, or the group may not be given.
            MemoryShortError: the mount is out of inodes or space.
        """
        fd = _create(name, 0o600)
        if fd is None:
            raise SegmentError(f"{path_of(name)} exists: expected no such segment")
        segment = Segment(name, fd)
        try:
            segment.give(access)
            if size:
                os.ftruncate(segment._fd, size)
        except BaseException:
            segment.unlink()
            segment.close()
            raise
        return segment

    @staticmethod
    def open(name: str, *, writable: bool = False) -> Segment | None:
        """The segment of that name, or None where there is none.

        Raises:
            AccessError: it may not be opened; the message has its owner and mode.
            SegmentError: it is no segment.
        """
        fd = _open(name, os.O_RDWR if writable else os.O_RDONLY)
        return None if fd is None else Segment(name, fd)

    def fileno(self) -> int:
        return self._fd

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    @property
    def owner_uid(self) -> int:
        return os.fstat(self._fd).st_uid

    def give(self, access: Access) -> None:
        """Sets mode and group.

        Raises:
            AccessError: the segment belongs to another user, or the group may not be given.
        """
        try:
            os.fchmod(self._fd, access.mode)
        except PermissionError:
            raise denied(self.name, "given a mode") from None
        if access.gid is not None:
            _give_group(self, access.gid)

    def write(self, data: bytes, at: int = 0) -> None:
        """Writes all of `data` at byte `at`, by pwrite: a mount that runs full is an error and no SIGBUS.

        Raises:
            MemoryShortError: the mount ran full.
        """
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._fd, view, at)  # short where the mount runs full inside it
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):  # the second is a cgroup's limit
                    raise
                raise MemoryShortError(
                    f"{path_of(self.name)} cannot be written: {os_reason(error)} ({space_text()})",
                    f"free or enlarge {SHM_DIR}, then start again",
                ) from None
            view, at = view[count:], at + count

    def is_named(self) -> bool:
        """Whether the name still leads to this very segment."""
        return inode_of(self.name) == self.inode

    def has_hole(self) -> bool:
        """Whether a page is missing; reading one on a full tmpfs is a SIGBUS."""
        facts = os.fstat(self._fd)
        return facts.st_blocks * 512 < facts.st_size

    def detach(self) -> int:
        """Hands the descriptor over to the caller, who closes it."""
        fd, self._fd = self._fd, -1
        return fd

    def unlink(self) -> bool:
        """Removes the name if it still leads here. Only the holder of the life lock may call this."""
        if not self.is_named():
            return False
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(self.name)
            return True
        return False

    def map_shared(self, *, writable: bool = False, huge: bool = False) -> mmap.mmap:
        """The segment's own pages. `huge` advises 2 MiB pages, before any is touched."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        view = mmap.mmap(self._fd, self.size, flags=mmap.MAP_SHARED, prot=prot)
        if huge:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: 4 KiB pages then
                view.madvise(mmap.MADV_HUGEPAGE)
        return view

    def map_private(self) -> mmap.mmap:
        """Copy-on-write pages over the segment: writable by this process and seen by no other.

        MAP_NORESERVE: a private writable mapping would commit its full size, although nothing is written.
        """
        return mmap.mmap(
            self._fd,
            self.size,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def path_of(name: str) -> Path:
    """The file that glibc's shm_open makes of a name."""
    return SHM_DIR / name.removeprefix("/")


def inode_of(name: str) -> int | None:
    """Inode that the name leads to now; None where there is none."""
    try:
        return path_of(name).lstat().st_ino
    except FileNotFoundError:
        return None


def held_bytes(name: str) -> int:
    """Bytes of pages that the name holds now; 0 where there is none."""
    try:
        return path_of(name).lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def unlink(name: str) -> int:
    """Removes a name whatever it leads to, and gives the bytes of pages it held. For the holder of the life lock,
    about names of its own namespace; a file that vanished meanwhile is 0 bytes.

    Raises:
        AccessError: it belongs to another user.
        SegmentError: it is no file.
    """
    held = held_bytes(name)
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return 0
    except posix_ipc.PermissionsError:
        raise denied(name, "removed", "let its owner or root remove it") from None
    except OSError as error:
        raise SegmentError(f"{path_of(name)} cannot be removed: {os_reason(error)}", "remove it by hand") from None
    return held


def open_or_create(name: str, mode: int) -> int:
    """A descriptor of the segment, made empty where it does not exist; for the life lock.

    Raises:
        AccessError: it belongs to another user, or /dev/shm may not be written.
        SegmentError: it is no segment.
    """
    fd = None
    while fd is None:
        # never O_CREAT on a file that exists: with fs.protected_regular that is refused to root too where the file is
        # another user's (proc_sys_fs(5)); what comes or goes between the two is met at the next try
        fd = _open(name, os.O_RDWR)
        if fd is None:
            fd = _create(name, mode)
    if os.fstat(fd).st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def denied(
    name: str, verb: str, remedy: str = "join that group, or set `mode` and `group` in the daemon's configuration"
) -> AccessError:
    """Why a segment may not be touched, with the owner, the mode and what to do about it."""
    path = path_of(name)
    try:
        facts = path.lstat()
    except OSError:
        return AccessError(f"{path} may not be {verb}: permission denied", "run as the daemon's user")
    owner = f"{user_name(facts.st_uid)}:{group_name(facts.st_gid)} mode {stat.S_IMODE(facts.st_mode):04o}"
    return AccessError(f"{path} may not be {verb} by {user_name(os.geteuid())}: it belongs to {owner}", remedy)


def _open(name: str, access: int) -> int | None:
    """A descriptor of what has the name, or None. As shm_open does it but for O_NONBLOCK: a fifo that somebody put
    there would hold every reader for ever."""
    path = path_of(name)
    try:
        fd = os.open(path, access | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise denied(name, "opened") from None
    except OSError as error:
        raise SegmentError(f"{path} cannot be opened: {os_reason(error)}", _REMOVE) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SegmentError(f"{path} cannot be opened: it is no regular file", _REMOVE)
    return fd


def _create(name: str, mode: int) -> int | None:
    """A descriptor of a new segment without bytes; None where the name is taken."""
    try:
        return int(posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=mode, size=0).fd)
    except posix_ipc.ExistentialError:
        return None
    except posix_ipc.PermissionsError:
        facts = SHM_DIR.stat()
        raise AccessError(
            f"{SHM_DIR} may not be written by {user_name(os.geteuid())}: it belongs to {user_name(facts.st_uid)}"
            f" mode {stat.S_IMODE(facts.st_mode):04o}, expected 1777",
            f"chmod 1777 {SHM_DIR}, or mount a tmpfs there",
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryShortError(
                f"{SHM_DIR} cannot hold another segment: {os_reason(error)} ({space_text()})",
                f"free space or inodes in {SHM_DIR}",
            ) from None
        raise SegmentError(f"{path_of(name)} cannot be made: {os_reason(error)}", f"look at {SHM_DIR}") from None


def _give_group(segment: Segment, gid: int) -> None:
    try:
        os.fchown(segment.fileno(), -1, gid)
    except PermissionError:
        raise AccessError(
            f"{path_of(segment.name)} cannot be given to group {group_name(gid)}:"
            f" {user_name(os.geteuid())} is no member",
            "add the daemon's user to the group, or change `group` in its configuration",
        ) from None


def free_bytes() -> int:
    """Bytes that /dev/shm still takes."""
    facts = os.statvfs(SHM_DIR)
    return facts.f_bavail * facts.f_frsize


def space_text() -> str:
    """`"1.00 GiB free of 2.00 GiB"`."""
    facts = os.statvfs(SHM_DIR)
    return f"{format_bytes(facts.f_bavail * facts.f_frsize)} free of {format_bytes(facts.f_blocks * facts.f_frsize)}"


def huge_policy() -> str:
    """The `huge=` option of the mount at /dev/shm (`never`, `advise`, `within_size`, `always`).

    The mount decides for POSIX shared memory; of /sys/kernel/mm/transparent_hugepage/shmem_enabled, which is for memfd
    and anonymous shared memory, only `deny` and `force` count here.
    """
    policy = "never"
    for mount in mounts():
        if mount.path == str(SHM_DIR):  # the last mount on a path is the one seen
            policy = next((o.removeprefix("huge=") for o in mount.options if o.startswith("huge=")), "never")
    return policy


@dataclass(frozen=True, slots=True)
class HugeObstacle:
    """Why no page of a segment can be huge, for the middle of a sentence, and what to do about it.

    Attributes:
        by_mount: the mount's option is what has to change.
    """

    found: str
    expected: str
    remedy: str
    by_mount: bool = False


def huge_obstacle(sysfs: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> HugeObstacle | None:
    """What keeps all pages of new segments small; None where 2 MiB pages may come.

    Args:
        sysfs: the kernel's folder about huge pages.
    """
    switch = sysfs / "shmem_enabled"
    try:
        override = switch.read_text()
    except OSError:
        override = ""
    if "[deny]" in override:  # over every mount's option
        return HugeObstacle(f"{switch} is deny", "never, by which the mount decides", f"echo never > {switch}")
    if huge_policy() != "never" or "[force]" in override:
        return None
    if not override:
        return HugeObstacle("this kernel has none", "CONFIG_TRANSPARENT_HUGEPAGE", "set huge_pages: auto")
    return HugeObstacle(
        f"{SHM_DIR} is mounted with huge=never",
        "advise, within_size or always",
        f"mount -o remount,huge=advise {SHM_DIR}",
        by_mount=True,
    )


def huge_bytes() -> dict[str, int]:
    """Bytes that this process maps by huge pages, by segment name, as /proc/self/smaps has them.

    For all segments at once: the kernel walks every page of the process for it.
    """
    totals: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(None, 5)
        if "-" in head[0] and not head[0].endswith(":"):
            path = Path(head[5]) if len(head) > 5 else Path()
            name = f"/{path.name}" if path.parent == SHM_DIR else ""
        elif name and head[0] == "ShmemPmdMapped:":
            totals[name] = totals.get(name, 0) + int(head[1]) * 1024
    return totals
