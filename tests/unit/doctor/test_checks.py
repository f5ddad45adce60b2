"""What is judged of hosts that nobody has at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftd.doctor.checks import FSTAB_LINE, HUGE_UNIT, Check, Verdict, judge, troubles
from ftd.doctor.facts import Gpus, Host, Memory, RunDir, Shm, User
from ftd.doctor.report import report, show
from ftd.shm.segment import HugeObstacle
from ftd.units import GIB, MIB

NO_GPU = Gpus("", 0, None, ("/dev/nvidia0",), (), "", "no libcudart was found", ())
H200S = Gpus("580.95.05", 2, None, (), (), "/opt/libcudart.so.13", "", (True, True))
BY_MOUNT = HugeObstacle("mounted with huge=never", "advise", "mount -o remount,huge=advise /dev/shm", by_mount=True)

GOOD = Host(
    kernel=(6, 1),
    shm=Shm("tmpfs", 64 * GIB, 64 * GIB, "root mode 1777", True, "advise", None, False),
    memory=Memory(100 * GIB, None, None, False),
    rundirs=(RunDir("/run/ftd", "ftd:ftd mode 0755", None),),
    given_rundir=False,
    gpus=H200S,
    user=User("ftd", True, False, False),
    nodes=(0,),
    strangers={},
    versions={"ftd": "0.1.0", "torch": None},
)
NAMES = [
    "kernel", "shm", "huge-pages", "memory", "memlock", "runtime-dir", "gpu", "gpu-nodes", "read-only-registration",
    "logind", "numa", "namespaces",
]  # fmt: skip


def check(name: str, host: Host) -> Check:
    return next(found for found in judge(host) if found.name == name)


def shm(**changed: Any) -> Host:
    return replace(GOOD, shm=replace(GOOD.shm, **changed))


def memory(gpus: Gpus = H200S, **changed: Any) -> Host:
    return replace(GOOD, memory=replace(GOOD.memory, **changed), gpus=gpus)


def gpus(**changed: Any) -> Host:
    return replace(GOOD, gpus=replace(H200S, **changed))


def user(**changed: Any) -> Host:
    return replace(GOOD, user=replace(User("ada", False, True, False), **changed))


def rundirs(*dirs: RunDir, given: bool = False) -> Host:
    return replace(GOOD, rundirs=dirs, given_rundir=given)


MINE = RunDir("/tmp/ftd-7", None, None)
OPEN = RunDir("/run/ftd", "root:root mode 0777", "writable by others than its owner (mode 0777)")


def test_a_host_that_suits_has_no_trouble() -> None:
    checks = judge(GOOD)
    assert [found.name for found in checks] == NAMES
    assert {found.verdict for found in checks} == {Verdict.OK}
    assert report(GOOD)["ok"]


def test_a_host_without_a_gpu_suits() -> None:
    assert list(troubles(judge(replace(GOOD, gpus=NO_GPU)))) == []


@pytest.mark.parametrize(
    ("name", "host", "verdict", "found", "remedy"),
    [
        ("kernel", replace(GOOD, kernel=(3, 14)), "failed", "Linux 3.14", "locks"),
        ("kernel", replace(GOOD, kernel=(5, 2)), "warning", "Linux 5.2", "--force"),
        ("kernel", replace(GOOD, kernel=(5, 3)), "ok", "Linux 5.3", ""),
        ("shm", shm(kind=""), "failed", "nothing is mounted there", "mount -t tmpfs"),
        ("shm", shm(kind="ext4"), "failed", "ext4 is mounted there", "mount -t tmpfs"),
        ("shm", shm(writable=False, owner="root mode 0755"), "failed", "root mode 0755", "chmod 1777 /dev/shm"),
        ("shm", shm(bytes=64 * MIB, free_bytes=60 * MIB), "warning", "60.00 MiB free of 64.00 MiB", "--shm-size"),
        ("huge-pages", shm(obstacle=BY_MOUNT), "warning", "huge=never", "mount -o remount,huge=advise /dev/shm; for"),
        ("huge-pages", shm(obstacle=BY_MOUNT), "warning", "huge=never", FSTAB_LINE),
        ("huge-pages", shm(obstacle=BY_MOUNT), "warning", "huge=never", HUGE_UNIT),
        ("huge-pages", shm(thp_off=True), "warning", "THP_enabled is 0", "PR_SET_THP_DISABLE"),
        ("huge-pages", shm(huge="always"), "ok", "huge=always", ""),
        ("memory", memory(cgroup_free_bytes=2 * GIB), "warning", "admits 2.00 GiB", "MemoryMax="),
        ("memory", memory(cgroup_free_bytes=64 * GIB), "ok", "admits 64.00 GiB", ""),
        ("memory", memory(cgroup_free_bytes=9 * GIB, available_bytes=8 * GIB), "ok", "8.00 GiB available", ""),
        ("memlock", memory(NO_GPU, memlock_bytes=64 << 10), "warning", "64.00 KiB", "LimitMEMLOCK=infinity"),
        ("memlock", memory(NO_GPU, memlock_bytes=64 << 10, may_lock=True), "ok", "CAP_IPC_LOCK", ""),
        ("memlock", memory(NO_GPU), "ok", "unlimited", ""),
        ("memlock", memory(memlock_bytes=64 << 10), "ok", "CUDA's pinning does not need", ""),
        ("runtime-dir", rundirs(OPEN, MINE), "ok", "/run/ftd: writable by others", ""),
        ("runtime-dir", rundirs(OPEN), "failed", "mode 0777", "FTD_RUNTIME_DIR"),
        ("runtime-dir", rundirs(OPEN, MINE, given=True), "failed", "mode 0777", "FTD_RUNTIME_DIR"),
        ("gpu", gpus(driver=""), "ok", "no NVIDIA driver", ""),
        ("gpu", gpus(), "ok", "driver 580.95.05, 2 of 2 visible, /opt/libcudart.so.13", ""),
        ("gpu", gpus(libcudart="", problem="no libcudart was found", read_only=()), "warning", "no libcudart", "torch"),
        ("gpu", gpus(problem="error 100", read_only=()), "failed", "error 100", "gpu-nodes"),
        ("gpu-nodes", gpus(missing=("/dev/nvidia-uvm",), problem="error 3"), "failed", "uvm is missing", "modprobe"),
        ("gpu-nodes", gpus(closed=("/dev/nvidia0",), problem="error 3"), "failed", "nvidia0 is closed", "DeviceAllow"),
        ("gpu-nodes", gpus(missing=("/dev/nvidia0",)), "ok", "nvidia0 is missing", ""),
        ("gpu-nodes", replace(GOOD, gpus=NO_GPU), "ok", "none needed", ""),
        ("read-only-registration", gpus(read_only=(True, False)), "warning", "GPU 1", "staging ring"),
        ("logind", user(), "warning", "weights that ada publishes are deleted", "loginctl enable-linger ada"),
        ("logind", user(lingers=True), "ok", "ada lingers", ""),
        ("logind", user(is_system=True), "ok", "spares system users", ""),
        ("logind", user(removes_ipc=False), "ok", "RemoveIPC=no", ""),
        ("numa", replace(GOOD, nodes=()), "ok", "without NUMA", ""),
        ("numa", replace(GOOD, nodes=(0, 1)), "ok", "nodes 0, 1 with memory", ""),
        ("namespaces", replace(GOOD, strangers={"llama": "eve"}), "warning", "llama of eve", "FTD_RUNTIME_DIR"),
    ],
)  # fmt: skip
def test_each_trouble_has_its_verdict_and_remedy(name: str, host: Host, verdict: str, found: str, remedy: str) -> None:
    judged = check(name, host)
    assert (judged.verdict, bool(judged.remedy)) == (verdict, verdict != "ok")
    assert found in judged.found
    assert remedy in judged.remedy


@pytest.mark.parametrize("given", ["", "-1", "MIG-9f3c/1/0", "GPU-11111111-2222", "3"])
def test_cuda_visible_devices_is_shown_as_given_and_never_read(given: str) -> None:
    """Ordinals, UUIDs, MIG names and nothing: only CUDA says what it makes of them."""
    assert f"CUDA_VISIBLE_DEVICES={given!r}" in check("gpu", gpus(visible_devices=given)).found
    hidden = check("gpu", gpus(visible_devices=given, problem="no GPU is visible", read_only=()))
    assert hidden.verdict is Verdict.WARNING
    assert "unset CUDA_VISIBLE_DEVICES" in hidden.remedy


def test_an_obstacle_that_no_mount_removes_is_not_answered_with_a_unit() -> None:
    judged = check("huge-pages", shm(obstacle=HugeObstacle("deny", "never", "echo never > /sys/x")))
    assert judged.remedy == "echo never > /sys/x"


def test_only_what_failed_is_not_well() -> None:
    assert report(shm(obstacle=BY_MOUNT))["ok"]
    assert not report(shm(writable=False))["ok"]


def test_the_object_is_as_documented() -> None:
    shown = report(shm(obstacle=BY_MOUNT))
    assert set(shown) == {"ok", "checks", "versions"}
    assert [set(item) for item in shown["checks"]] == [{"name", "verdict", "found", "expected", "remedy"}] * len(NAMES)
    assert shown["versions"] == {"ftd": "0.1.0", "torch": None}


def test_people_see_every_check_and_then_the_remedies_the_worst_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(report(replace(shm(obstacle=BY_MOUNT), kernel=(3, 2))))
    table, remedies = capsys.readouterr().out.split("ftd 0.1.0\n")
    assert [line.split()[0] for line in table.splitlines()] == ["CHECK", *NAMES]
    assert remedies.splitlines()[0] == "failed: kernel: Linux 3.2: expected Linux 5.3 or later"
    assert remedies.splitlines()[3].startswith("  → mount -o remount,huge=advise /dev/shm")
