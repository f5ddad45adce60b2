from pathlib import Path

import pytest

from ftd.daemon import headroom
from ftd.daemon.headroom import Limit, cgroup_free_bytes, check, limits
from ftd.errors import EXIT_MEMORY, MemoryShortError
from ftd.units import GIB, MIB

UNLIMITED_V1 = (1 << 63) - 4096  # what cgroup v1 writes where there is no limit


def _write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        # the kernel's names have one dot, after the controller
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def _free(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "cgroup").write_text(membership)
    return cgroup_free_bytes(tmp_path / "fs", tmp_path / "cgroup")


# --- cgroup v2 ---------------------------------------------------------------------------------------------------


def test_v2_limit_of_the_unit(tmp_path: Path) -> None:
    folder = tmp_path / "fs/system.slice/ftd.service"
    _write(folder, memory__max=10 * GIB, memory__current=4 * GIB)
    assert _free(tmp_path, "0::/system.slice/ftd.service\n") == 6 * GIB


def test_v2_page_cache_that_can_be_dropped_counts_as_free(tmp_path: Path) -> None:
    _write(tmp_path / "fs/a", memory__max=10 * GIB, memory__current=9 * GIB)
    (tmp_path / "fs/a/memory.stat").write_text(f"anon 5\nfile 77\ninactive_file {2 * GIB}\nshmem 9\n")
    assert _free(tmp_path, "0::/a\n") == 3 * GIB


def test_v2_the_tightest_of_all_levels_counts(tmp_path: Path) -> None:
    _write(tmp_path / "fs/pods/a/b", memory__max="max", memory__current=1 * GIB)
    _write(tmp_path / "fs/pods/a", memory__max=8 * GIB, memory__current=7 * GIB)
    _write(tmp_path / "fs/pods", memory__max=100 * GIB, memory__current=90 * GIB)
    assert _free(tmp_path, "0::/pods/a/b\n") == 1 * GIB


def test_v2_the_root_of_a_container_is_its_limit(tmp_path: Path) -> None:
    """Its membership names a path outside what is mounted there."""
    _write(tmp_path / "fs", memory__max=2 * GIB, memory__current=GIB // 2)
    for membership in ("0::/\n", "0::/docker/abc\n", "0::/../../kubepods/x\n"):
        assert _free(tmp_path, membership) == 3 * GIB // 2


def test_v2_levels_above_the_mount_are_not_looked_for(tmp_path: Path) -> None:
    _write(tmp_path, memory__max=1, memory__current=0)  # beside the hierarchy, not in it
    _write(tmp_path / "fs/a", memory__max=5, memory__current=0)
    assert _free(tmp_path, "0::/a\n") == 5


def test_v2_a_full_cgroup_has_nothing_and_not_less(tmp_path: Path) -> None:
    _write(tmp_path / "fs/a", memory__max=1000, memory__current=1500)
    assert _free(tmp_path, "0::/a\n") == 0


def test_v2_beside_v1_lies_in_unified(tmp_path: Path) -> None:
    _write(tmp_path / "fs/unified/a", memory__max=1000, memory__current=400)
    assert _free(tmp_path, "4:memory:/\n0::/a\n") == 600


# --- cgroup v1 ---------------------------------------------------------------------------------------------------


def test_v1_limit_with_cache(tmp_path: Path) -> None:
    folder = tmp_path / "fs/memory/docker/x"
    _write(folder, memory__limit_in_bytes=10 * GIB, memory__usage_in_bytes=9 * GIB)
    (folder / "memory.stat").write_text(f"cache 5\ninactive_file 1\ntotal_inactive_file {3 * GIB}\n")
    assert _free(tmp_path, "12:cpu,cpuacct:/other\n4:memory:/docker/x\n") == 4 * GIB


def test_v1_a_controller_among_others_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "fs/memory/a", memory__limit_in_bytes=100, memory__usage_in_bytes=10)
    assert _free(tmp_path, "4:hugetlb,memory:/a\n") == 90
    assert _free(tmp_path, "4:memory_tiers:/a\n") is None


def test_v1_without_a_limit(tmp_path: Path) -> None:
    _write(tmp_path / "fs/memory/a", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=5 * GIB)
    assert _free(tmp_path, "4:memory:/a\n") is None


def test_both_hierarchies_count(tmp_path: Path) -> None:
    _write(tmp_path / "fs/memory/a", memory__limit_in_bytes=1000, memory__usage_in_bytes=100)
    _write(tmp_path / "fs/unified/b", memory__max=800, memory__current=100)
    assert _free(tmp_path, "4:memory:/a\n0::/b\n") == 700


# --- what cannot be read -----------------------------------------------------------------------------------------


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path / "fs", tmp_path / "none") is None
    assert _free(tmp_path, "") is None
    assert _free(tmp_path, "0::/a\n") is None


@pytest.mark.parametrize("text", ["", "max", "-5", "1.5", "many"])
def test_a_number_that_is_none_is_no_limit(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "fs/a", memory__max=text, memory__current=5)
    assert _free(tmp_path, "0::/a\n") is None


@pytest.mark.parametrize("text", ["", "inactive_file\n", "a b c\n", "anon 5\n"])
def test_a_stat_that_does_not_tell_frees_nothing(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "fs/a", memory__max=10, memory__current=5)
    (tmp_path / "fs/a/memory.stat").write_text(text)
    assert _free(tmp_path, "0::/a\n") == 5


def test_a_colon_in_the_path_belongs_to_it(tmp_path: Path) -> None:
    _write(tmp_path / "fs/a:b", memory__max=10, memory__current=5)
    assert _free(tmp_path, "0::/a:b\n") == 5


def test_this_host_can_be_asked() -> None:
    free = cgroup_free_bytes()
    assert free is None or free >= 0


# --- the message -------------------------------------------------------------------------------------------------


def test_the_tightest_bound_is_named_with_needed_and_free_bytes() -> None:
    bounds = [
        Limit("wide", 10 * GIB, "no"),
        Limit("the memory cgroup", 3 * MIB, "raise MemoryMax="),
        Limit("w", GIB, "no"),
    ]
    with pytest.raises(MemoryShortError) as raised:
        check(5 * MIB, bounds, lambda: "; held by python 7")
    assert raised.value.message == (
        "the weights need 5242880 bytes (5.00 MiB) of shared memory,"
        " the memory cgroup has 3145728 free (3.00 MiB); held by python 7"
    )
    assert raised.value.remedy == "raise MemoryMax="
    assert raised.value.exit_status == EXIT_MEMORY


def test_what_fits_to_the_last_byte_fits() -> None:
    bounds = [Limit("a", 100, ""), Limit("b", 200, "")]
    check(100, bounds, lambda: pytest.fail("every process was looked at for nothing"))
    with pytest.raises(MemoryShortError):
        check(101, bounds, str)


def test_every_bound_that_holds_here_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "cgroup_free_bytes", lambda: 5)
    found = {limit.what.partition(" (")[0]: limit for limit in limits(memory_budget=7)}
    assert list(found) == ["/dev/shm", "available memory", "the memory cgroup", "memory_budget"]
    assert (found["the memory cgroup"].free, found["memory_budget"].free) == (5, 7)
    assert found["/dev/shm"].free > 0 and found["available memory"].free > 0
    assert " free of " in found["/dev/shm"].what
    assert "mount -o remount,size=" in found["/dev/shm"].remedy
    assert "MemoryMax=" in found["the memory cgroup"].remedy
    assert "memory_budget" in found["memory_budget"].remedy


def test_what_does_not_bound_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "cgroup_free_bytes", lambda: None)
    assert [limit.what.partition(" (")[0] for limit in limits(None)] == ["/dev/shm", "available memory"]


def test_a_budget_of_nothing_admits_nothing() -> None:
    with pytest.raises(MemoryShortError, match="memory_budget has 0 free"):
        check(1, limits(memory_budget=0), str)
