"""Looking at this host, and reading what other hosts would say."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError
from ftd.doctor import probe
from ftd.doctor.probe import kernel_version, look, remove_ipc
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment
from ftd.units import MIB
from tests.conftest import NOBODY

InChild = Callable[..., Any]

_PR_SET_THP_DISABLE = 41  # <linux/prctl.h>


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.1.0-18-amd64", (6, 1)), ("6.18.44", (6, 18)), ("4.18.0-553.el8.x86_64", (4, 18)), ("odd", (0, 0))],
)
def test_kernel_releases_are_read(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version


@pytest.mark.parametrize(
    ("texts", "on"),
    [
        ([], True),  # systemd's own default
        (["[Login]\n#RemoveIPC=yes\n"], True),
        (["[Login]\n#RemoveIPC=no\n"], False),  # a distribution's default
        (["[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n"], False),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"], True),  # the last file wins
        (["[Login]\n#RemoveIPC=no\n", "[Login]\nRemoveIPC = 1\n"], True),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=\n"], False),
        (["[Login]\nNotRemoveIPC=yes\n#RemoveIPC=no\n"], False),
    ],
)
def test_what_logind_does_is_read_from_its_files(texts: Sequence[str], on: bool) -> None:
    assert remove_ipc(texts) is on


def test_drop_ins_follow_the_main_file_and_mask_those_of_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    for folder, name, text in (
        (usr, "logind.conf", "vendor"),
        (usr, "logind.conf.d/10-a.conf", "masked"),
        (usr, "logind.conf.d/20-b.conf", "b"),
        (etc, "logind.conf.d/10-a.conf", "a"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(probe, "_LOGIND_DIRS", (etc, usr))
    assert probe._logind_texts() == ["vendor", "a", "b"]
    (etc / "logind.conf").write_text("own")
    assert probe._logind_texts() == ["own", "a", "b"]


def test_this_host_is_seen(runtime_dir: Path) -> None:
    host = look(os.environ)
    assert host.kernel >= (3, 15)
    assert (host.shm.kind, host.shm.writable) == ("tmpfs", True)
    assert 0 <= host.shm.free_bytes <= host.shm.bytes
    assert host.given_rundir
    assert (host.rundirs[0].path, host.rundirs[0].problem) == (str(runtime_dir), None)
    assert host.versions["ftd"]


def test_a_small_mount_is_seen(in_child: InChild) -> None:
    host = in_child(lambda: look({}), shm="size=2m,mode=0755,huge=advise")
    assert (host.shm.bytes, host.shm.huge, host.shm.obstacle) == (2 * MIB, "advise", None)
    assert host.shm.owner == "root mode 0755"


def test_who_may_not_write_is_seen(in_child: InChild) -> None:
    assert not in_child(lambda: look({}), uid=NOBODY, shm="size=2m,mode=0755").shm.writable


def test_a_process_without_huge_pages_is_seen(in_child: InChild) -> None:
    def off() -> bool:
        assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        return look({}).shm.thp_off

    assert in_child(off)
    assert not look({}).shm.thp_off


@pytest.mark.leaves_segments
def test_namespaces_of_users_that_nobody_vouches_for_are_seen(
    namespace: str, runtime_dir: Path, in_child: InChild
) -> None:
    names = Names(namespace)
    in_child(lambda: Segment.create(names.coord, 1, Access()).close(), uid=NOBODY)
    assert namespace in look(os.environ).strangers
    os.chown(runtime_dir, NOBODY, -1)  # its owner is whom workers of this runtime directory expect
    assert namespace not in look(os.environ).strangers
    assert namespace not in in_child(lambda: look({}), uid=NOBODY).strangers


class _Runtime:
    """Two GPUs, of which one lacks read-only registration. Any other call would make a context, and is none."""

    def __init__(self, *, lost: bool = False) -> None:
        self._lost = lost

    def device_count(self) -> int:
        return 2

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        assert attribute == READ_ONLY_REGISTRATION
        if self._lost:
            raise CudaError("cudaDeviceGetAttribute: GPU is lost")
        return 1 - ordinal


def test_gpus_are_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_runtime", lambda: (_Runtime(), ""))
    gpus = look({"CUDA_VISIBLE_DEVICES": "MIG-1/2/3"}).gpus
    assert (gpus.read_only, gpus.problem, gpus.visible_devices) == ((True, False), "", "MIG-1/2/3")


def test_a_gpu_that_is_lost_is_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_runtime", lambda: (_Runtime(lost=True), ""))
    gpus = look({}).gpus
    assert (gpus.read_only, gpus.visible_devices) == ((), None)
    assert "GPU is lost" in gpus.problem


def test_a_driver_and_its_nodes_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpus/0000:18:00.0").mkdir(parents=True)
    (tmp_path / "gpus/0000:2a:00.0").mkdir()
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\nGCC version: 12\n"
    )
    monkeypatch.setattr(probe, "_DRIVER_DIR", tmp_path)
    gpus = look({}).gpus
    assert (gpus.driver, gpus.present) == ("580.95.05", 2)
