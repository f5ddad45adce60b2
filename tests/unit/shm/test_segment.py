import grp
import mmap
import os
import pwd
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from ftd.errors import AccessError, MemoryShortError, SegmentError
from ftd.shm import segment as module
from ftd.shm.names import Names
from ftd.shm.segment import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    Access,
    Segment,
    denied,
    free_bytes,
    held_bytes,
    huge_bytes,
    huge_obstacle,
    huge_policy,
    inode_of,
    open_or_create,
    path_of,
    space_text,
    unlink,
)
from ftd.units import MIB
from tests.conftest import NOBODY

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]


@pytest.fixture
def name(names: Names) -> str:
    return names.weights(1, 0)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _mode(name: str) -> int:
    return stat.S_IMODE(path_of(name).stat().st_mode)


def _pages(view: mmap.mmap) -> bytes:
    return bytes(view[:])


def test_a_new_segment_has_its_size_and_no_pages(name: str) -> None:
    with Segment.create(name, 3 * PAGE_BYTES, Access()) as segment:
        assert segment.size == path_of(name).stat().st_size == 3 * PAGE_BYTES
        assert segment.inode == inode_of(name)
        assert segment.has_hole()
        assert segment.is_named()


def test_a_name_is_given_once(name: str) -> None:
    with (
        Segment.create(name, 10, Access()) as first,
        pytest.raises(SegmentError, match=f"/dev/shm{name} exists: expected no such segment"),
    ):
        Segment.create(name, 20, Access())
    assert (inode_of(name), path_of(name).stat().st_size) == (os.stat(path_of(name)).st_ino, 10)
    assert first.fileno() == -1


def test_what_is_not_there_is_none(name: str) -> None:
    assert Segment.open(name) is None
    assert Segment.open(name, writable=True) is None
    assert inode_of(name) is None
    assert unlink(name) == 0


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o660])
def test_the_mode_is_what_was_asked_for_whatever_the_umask(name: str, mask: int, mode: int) -> None:
    with umask(mask), Segment.create(name, 1, Access(mode)):
        assert _mode(name) == mode


def test_the_lock_is_its_owners_alone_whatever_the_umask(names: Names) -> None:
    with umask(0):
        os.close(open_or_create(names.lock, 0o600))
        assert _mode(names.lock) == 0o600
    path_of(names.lock).chmod(0o666)  # one that somebody opened up is closed again
    os.close(open_or_create(names.lock, 0o600))
    assert _mode(names.lock) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a segment to a group")
def test_a_segment_is_given_to_its_group(name: str) -> None:
    with Segment.create(name, 1, Access(0o640, NOBODY)):
        assert path_of(name).stat().st_gid == NOBODY


def test_a_group_that_may_not_be_given_leaves_no_segment(name: str, in_child: InChild) -> None:
    def create() -> None:
        Segment.create(name, 1, Access(0o640, 0))

    root = grp.getgrgid(0).gr_name
    with pytest.raises(AccessError, match=f"/dev/shm{name} cannot be given to group {root}: .* is no member"):
        in_child(create, uid=NOBODY)
    assert inode_of(name) is None


def test_opening_and_creating_is_one_step(names: Names) -> None:
    with Segment(names.lock, open_or_create(names.lock, 0o600)) as one:
        os.write(one.fileno(), b"x")
        with Segment(names.lock, open_or_create(names.lock, 0o600)) as other:
            assert (other.inode, other.size) == (one.inode, 1)


def test_a_lock_of_another_user_is_opened_without_creating(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """fs.protected_regular of a default host: O_CREAT on another's file in a sticky directory is refused, to root too,
    who must open a user's lock to clean up after it."""
    path_of(names.lock).touch()
    real_open, real_shm = os.open, posix_ipc.SharedMemory

    def protected_open(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and path_of(names.lock).exists():
            raise PermissionError
        return real_open(path, flags, *mode)

    def protected_shm(name: str, flags: int = 0, **rest: Any) -> posix_ipc.SharedMemory:
        if flags & posix_ipc.O_CREAT and not flags & posix_ipc.O_EXCL and path_of(name).exists():
            raise posix_ipc.PermissionsError
        return real_shm(name, flags=flags, **rest)

    monkeypatch.setattr(os, "open", protected_open)
    monkeypatch.setattr(posix_ipc, "SharedMemory", protected_shm)
    for _ in range(2):
        with Segment(names.lock, open_or_create(names.lock, 0o600)) as lock:
            assert lock.is_named()
        path_of(names.lock).unlink(missing_ok=True)


@pytest.mark.parametrize("comes", [True, False])
def test_a_lock_that_comes_and_goes_is_tried_again(names: Names, monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    """Another start makes it, or an ending creator removes it, between the two attempts."""
    real, rounds = module._create, []

    def create(name: str, mode: int) -> int | None:
        rounds.append(name)
        if len(rounds) == 1:
            path_of(name).touch()
            assert real(name, mode) is None
            if not comes:
                path_of(name).unlink()
            return None
        return real(name, mode)

    monkeypatch.setattr(module, "_create", create)
    with Segment(names.lock, open_or_create(names.lock, 0o600)) as lock:
        assert lock.is_named()
    assert len(rounds) == (1 if comes else 2)


def test_descriptors_are_not_inherited_by_programs(names: Names) -> None:
    with (
        Segment.create(names.coord, 1, Access()) as made,
        Segment.open(names.coord) as opened,  # type: ignore[union-attr]
        Segment(names.lock, open_or_create(names.lock, 0o600)) as lock,
    ):
        assert not any(map(os.get_inheritable, (made.fileno(), opened.fileno(), lock.fileno())))


def test_only_the_very_segment_is_unlinked(name: str) -> None:
    """SH-06: a name that leads elsewhere by now is somebody else's."""
    with Segment.create(name, 1, Access()) as old:
        path_of(name).unlink()
        assert not old.is_named()
        assert old.unlink() is False
        with Segment.create(name, 2, Access()) as new:
            assert not old.is_named()
            assert old.unlink() is False
            assert inode_of(name) == new.inode
            assert new.unlink() is True
            assert inode_of(name) is None


def test_unlinking_gives_the_bytes_of_pages_and_leaves_mappings_alone(name: str) -> None:
    with Segment.create(name, 3 * PAGE_BYTES, Access()) as segment:
        view = segment.map_shared(writable=True)
        view[PAGE_BYTES] = 7
        assert unlink(name) == PAGE_BYTES
    assert view[PAGE_BYTES] == 7
    assert inode_of(name) is None


def test_a_hole_is_seen_until_the_last_page_is_there(name: str) -> None:
    size = 2 * PAGE_BYTES + 1
    with Segment.create(name, size, Access()) as segment:
        for at in (0, 2 * PAGE_BYTES):
            os.pwrite(segment.fileno(), b"x", at)
            assert segment.has_hole()
        os.pwrite(segment.fileno(), b"x", PAGE_BYTES)
        assert not segment.has_hole()


def test_a_write_at_the_wrong_length_of_nothing_is_no_hole(name: str) -> None:
    with Segment.create(name, 0, Access()) as segment:
        assert not segment.has_hole()


def test_everybody_sees_what_is_written_through_a_shared_mapping(name: str, in_child: InChild) -> None:
    with Segment.create(name, PAGE_BYTES, Access()) as segment:
        view = segment.map_shared(writable=True)
        view[:3] = b"abc"
    reader = Segment.open(name)
    assert reader is not None
    with reader:
        assert reader.map_shared()[:3] == b"abc"

    def read() -> bytes:
        with Segment.open(name) as segment:  # type: ignore[union-attr]
            return bytes(segment.map_shared()[:3])

    assert in_child(read) == b"abc"


def test_a_read_only_mapping_cannot_be_written(name: str) -> None:
    Segment.create(name, PAGE_BYTES, Access()).close()
    with Segment.open(name) as segment:  # type: ignore[union-attr]
        view = segment.map_shared()
        with pytest.raises(TypeError, match=r"read-only|can't modify"):
            view[0] = 1
        with pytest.raises(PermissionError):
            segment.map_shared(writable=True)


def test_a_private_mapping_is_written_by_its_owner_and_seen_by_nobody(name: str, in_child: InChild) -> None:
    with Segment.create(name, 2 * PAGE_BYTES, Access()) as segment:
        shared = segment.map_shared(writable=True)
        shared[:] = b"s" * len(shared)
    with Segment.open(name) as read_only:  # type: ignore[union-attr]
        mine, other = read_only.map_private(), read_only.map_private()
        mine[:3] = b"xyz"
        assert _pages(mine) == b"xyz" + _pages(shared)[3:]
        assert _pages(other) == _pages(shared) == b"s" * len(shared)
        assert path_of(name).read_bytes() == _pages(shared)
        shared[PAGE_BYTES] = ord("t")  # a page that was not written privately is still the segment's
        assert mine[PAGE_BYTES] == ord("t")

    def write_in_child() -> None:
        with Segment.open(name) as segment:  # type: ignore[union-attr]
            segment.map_private()[:3] = b"123"

    in_child(write_in_child)
    assert shared[:3] == b"sss"


def test_a_private_mapping_commits_nothing(name: str) -> None:
    """MAP_NORESERVE: else a model would count twice against a host that does not overcommit."""
    with Segment.create(name, 64 * MIB, Access()) as segment:
        view = segment.map_private()
        flags = _flags_of_mapping(path_of(name))
        assert "nr" in flags and "ac" not in flags
        assert len(view) == 64 * MIB


def _flags_of_mapping(path: Path) -> list[str]:
    """VmFlags of the one mapping of a file (proc(5), smaps)."""
    rows = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, row in enumerate(rows) if row.endswith(str(path)))
    return next(row for row in rows[start:] if row.startswith("VmFlags:")).split()[1:]


def test_a_detached_descriptor_is_the_callers(name: str) -> None:
    segment = Segment.create(name, 1, Access())
    fd = segment.detach()
    segment.close()
    assert os.fstat(fd).st_size == 1
    os.close(fd)


def test_closing_twice_closes_nobody_elses_descriptor(name: str) -> None:
    segment = Segment.create(name, 1, Access())
    number = segment.fileno()
    segment.close()
    reused = os.open("/dev/null", os.O_RDONLY)
    try:
        assert reused == number
        segment.close()
        os.fstat(reused)
    finally:
        os.close(reused)


def test_a_write_leaves_no_hole_and_stands_where_it_was_asked(name: str) -> None:
    with Segment.create(name, 0, Access()) as segment:
        segment.write(b"b" * PAGE_BYTES, PAGE_BYTES)
        segment.write(b"a" * PAGE_BYTES)
        assert not segment.has_hole()
        assert path_of(name).read_bytes() == b"a" * PAGE_BYTES + b"b" * PAGE_BYTES


def test_a_full_mount_is_an_error_with_numbers(name: str, in_child: InChild) -> None:
    def fill() -> None:
        with Segment.create(name, 0, Access()) as segment:
            segment.write(bytes(3 * MIB))

    with pytest.raises(
        MemoryShortError, match=rf"{name} cannot be written: no space left .*0 B free of 1\.00 MiB"
    ) as info:
        in_child(fill, shm="size=1m")
    assert info.value.exit_status == 6


def test_a_mount_without_inodes_is_an_error_with_the_reason(name: str, in_child: InChild) -> None:
    def create() -> None:
        Segment.create(name, 1, Access())

    with pytest.raises(MemoryShortError, match=r"/dev/shm cannot hold another segment: no space left on device"):
        in_child(create, shm="size=1m,nr_inodes=1")


@pytest.mark.parametrize("writable", [False, True])
def test_who_may_not_open_a_segment_is_told_whose_it_is(name: str, in_child: InChild, writable: bool) -> None:
    Segment.create(name, 1, Access(0o640)).close()
    owner, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    me = pwd.getpwuid(NOBODY).pw_name
    with pytest.raises(AccessError) as raised:
        in_child(lambda: Segment.open(name, writable=writable), uid=NOBODY)
    expected = f"/dev/shm{name} may not be opened by {me}: it belongs to {owner}:{group} mode 0640"
    assert raised.value.message == expected
    assert "`mode` and `group`" in raised.value.remedy


def test_who_may_not_create_is_told_why(name: str, in_child: InChild) -> None:
    with pytest.raises(
        AccessError, match=r"/dev/shm may not be written by .*: it belongs to root mode 0755, expected 1777"
    ):
        in_child(lambda: Segment.create(name, 1, Access()), uid=NOBODY, shm="mode=0755,size=1m")


def test_nobody_removes_what_belongs_to_another(name: str, in_child: InChild) -> None:
    Segment.create(name, 1, Access(0o666)).close()
    with pytest.raises(AccessError, match=f"/dev/shm{name} may not be removed by .* mode 0666") as raised:
        in_child(lambda: unlink(name), uid=NOBODY)
    assert "root" in raised.value.remedy
    assert inode_of(name) is not None


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_is_no_file_is_refused_at_once(
    name: str, in_child: InChild, make: Callable[[Path], None], writable: bool
) -> None:
    """Anybody may put a fifo in the place of a block: it must hold nobody who looks."""

    def look() -> None:
        signal.alarm(10)
        Segment.open(name, writable=writable)

    make(path_of(name))
    try:
        with pytest.raises(SegmentError, match=f"/dev/shm{name} cannot be opened"):
            in_child(look)
        assert inode_of(name) == path_of(name).lstat().st_ino
    finally:
        path_of(name).rmdir() if path_of(name).is_dir() else path_of(name).unlink()


def test_a_directory_cannot_be_removed(name: str) -> None:
    path_of(name).mkdir()
    try:
        with pytest.raises(SegmentError, match=f"/dev/shm{name} cannot be removed: "):
            unlink(name)
    finally:
        path_of(name).rmdir()


def test_a_link_is_removed_and_not_followed(name: str) -> None:
    path_of(name).symlink_to("nowhere")
    assert unlink(name) == 0
    assert not os.path.lexists(path_of(name))


def test_the_bytes_that_a_name_holds(name: str) -> None:
    assert held_bytes(name) == 0  # gone between a listing and this
    with Segment.create(name, 3 * PAGE_BYTES, Access()) as segment:
        os.pwrite(segment.fileno(), b"x", 0)
        assert held_bytes(name) == PAGE_BYTES


def test_a_user_and_group_without_a_name_are_shown_by_number(name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: gives a segment away")
    Segment.create(name, 1, Access(0o600)).close()
    os.chown(path_of(name), 54321, 54322)
    assert "it belongs to uid 54321:gid 54322 mode 0600" in denied(name, "opened").message


def test_what_vanished_meanwhile_is_still_a_sentence(name: str) -> None:
    assert denied(name, "opened").message == f"/dev/shm{name} may not be opened: permission denied"


def test_a_link_that_somebody_planted_is_not_followed(names: Names, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x")
    path_of(names.lock).symlink_to(target)
    with pytest.raises(SegmentError, match="cannot be opened"):
        open_or_create(names.lock, 0o600)
    assert target.read_bytes() == b"x"


def test_free_space_is_that_of_the_mount(in_child: InChild) -> None:
    assert in_child(lambda: (free_bytes(), space_text()), shm="size=2m") == (2 * MIB, "2.00 MiB free of 2.00 MiB")
    assert free_bytes() > 0


@pytest.mark.parametrize(
    ("options", "policy"),
    [("size=2m", "never"), ("size=2m,huge=advise", "advise"), ("size=2m,huge=within_size", "within_size")],
)
def test_the_mount_says_whether_pages_can_be_huge(options: str, policy: str, in_child: InChild) -> None:
    assert in_child(huge_policy, shm=options) == policy


@pytest.mark.parametrize(
    ("policy", "override", "what", "remedy"),
    [
        ("advise", "always within_size advise [never] deny force", None, None),
        ("always", None, None, None),  # a container that sees no /sys
        ("never", "always within_size advise never deny [force]", None, None),
        ("never", "always within_size advise [never] deny force", "mounted with huge=never", "mount -o remount,huge"),
        ("advise", "always within_size advise never [deny] force", "shmem_enabled is deny", "echo never > "),
        ("never", "always within_size advise never [deny] force", "shmem_enabled is deny", "echo never > "),
        ("never", None, "this kernel has none", "huge_pages: auto"),
    ],
)
def test_what_keeps_pages_small_is_named_with_its_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    override: str | None,
    what: str | None,
    remedy: str | None,
) -> None:
    monkeypatch.setattr(module, "huge_policy", lambda: policy)
    if override is not None:
        (tmp_path / "shmem_enabled").write_text(override)
    found = huge_obstacle(tmp_path)
    if what is None or remedy is None:
        assert found is None
    else:
        assert found is not None and what in found.found and remedy in found.remedy


def test_huge_pages_are_counted_as_they_were_got(name: str, in_child: InChild) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no transparent huge pages")

    def got(huge: bool) -> int:
        with Segment.create(name, 2 * HUGE_PAGE_BYTES, Access()) as segment:
            view = segment.map_shared(writable=True, huge=huge)
            before = huge_bytes().get(name, 0)
            view[:] = bytes(len(view))
            assert before == 0
            return huge_bytes().get(name, 0)

    assert in_child(lambda: got(huge=False), shm="size=16m,huge=advise") == 0
    # memory may be fragmented: not all need come, and none may be invented
    assert in_child(lambda: got(huge=True), shm="size=16m,huge=advise") in (0, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)
