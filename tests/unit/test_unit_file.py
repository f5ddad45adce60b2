"""The systemd units: they parse without a complaint, and say what the product depends on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.shm.segment import huge_policy

InChild = Callable[..., Any]

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "ftd@.service"
HUGE_PAGES = SYSTEMD / "ftd-huge-pages.service"

Settings = dict[str, list[str]]


def parse(text: str) -> dict[str, Settings]:
    """Sections of a unit file; a key may stand several times."""
    sections: dict[str, Settings] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            current.setdefault(key, []).append(value)
    return sections


@pytest.fixture(scope="module")
def service() -> Settings:
    return parse(UNIT.read_text())["Service"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # the manager hears from the daemon alone, and starts it with the namespace unescaped
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("ExecStart", "ftd start --namespace %i"),
        # a system user keeps its shared memory when a session ends
        ("User", "ftd"),
        ("Group", "ftd"),
        ("RemoveIPC", "no"),
        # usage errors and "already running" do not heal
        ("Restart", "on-failure"),
        ("RestartPreventExitStatus", "2 5"),
        # one instance's stop leaves the others their directory
        ("RuntimeDirectory", "ftd"),
        ("RuntimeDirectoryMode", "0755"),
        ("RuntimeDirectoryPreserve", "yes"),
        # the model is locked memory, and killing its owner frees nothing
        ("LimitMEMLOCK", "infinity"),
        ("OOMScoreAdjust", "-900"),
        ("LimitNOFILE", "65536"),
        ("TimeoutStartSec", "60"),
        ("TimeoutStopSec", "120"),
        ("WatchdogSec", "30"),
        ("UMask", "0077"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "read-only"),
        ("NoNewPrivileges", "yes"),
        ("RestrictAddressFamilies", "AF_UNIX"),
        ("DevicePolicy", "closed"),
    ],
)
def test_what_the_product_depends_on_is_set_once(service: Settings, key: str, value: str) -> None:
    assert service[key] == [value]


def test_every_class_of_gpu_nodes_is_allowed(service: Settings) -> None:
    # names of /proc/devices: `nvidia` and `nvidiactl` of driver 580, `nvidia-frontend` of earlier ones
    classes = ("nvidia", "nvidiactl", "nvidia-frontend", "nvidia-uvm", "nvidia-caps")
    assert service["DeviceAllow"] == [f"char-{name} rw" for name in classes]


@pytest.mark.parametrize(
    "key",
    [
        "PIDFile",
        "DynamicUser",
        "PrivateDevices",
        "PrivateIPC",
        "PrivateTmp",
        "PrivateUsers",
        "PrivateNetwork",
        "ProtectProc",
        "ProcSubset",
        "MemoryDenyWriteExecute",
        "SystemCallFilter",
        "InaccessiblePaths",
        "TemporaryFileSystem",
    ],
)
def test_what_would_break_the_product_is_not_set(service: Settings, key: str) -> None:
    assert key not in service


def verify(text: str, directory: Path) -> list[str]:
    """What systemd says about a unit of this text: lines that name it."""
    # verify looks for ExecStart's program on the system path, where a test's ftd is not
    assert "ExecStart=ftd start" in text
    (directory / "ftd@.service").write_text(text.replace("ExecStart=ftd start", f"ExecStart={sys.executable} start"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(directory / "ftd@test.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # it also loads what our unit is ordered after, and complains about the host's own units
    return [line for line in (done.stdout + done.stderr).splitlines() if "ftd@" in line]


needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@needs_systemd_analyze
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    assert verify(UNIT.read_text(), tmp_path) == []


@needs_systemd_analyze
def test_systemd_has_nothing_to_say_about_the_one_for_huge_pages() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(HUGE_PAGES)], capture_output=True, text=True, timeout=60
    )
    # it says where a program was not found, too: mount is on the system path
    assert [line for line in (done.stdout + done.stderr).splitlines() if "ftd" in line] == []


def test_huge_pages_come_before_any_daemon() -> None:
    # here and not there: a Before= cannot name a template
    after = parse(UNIT.read_text())["Unit"]["After"]
    assert HUGE_PAGES.name in " ".join(after).split()
    service = parse(HUGE_PAGES.read_text())["Service"]
    assert service["Type"] == ["oneshot"]  # until it has ended, what is ordered after it waits
    assert service["ExecStart"] == ["mount -o remount,huge=advise /dev/shm"]


def test_the_command_of_the_unit_changes_the_option_alone(in_child: InChild) -> None:
    (command,) = parse(HUGE_PAGES.read_text())["Service"]["ExecStart"]

    def remounted() -> tuple[str, str, int, int]:
        before, size = huge_policy(), os.statvfs("/dev/shm").f_blocks
        subprocess.run(command.split(), check=True, timeout=60)
        return before, huge_policy(), size, os.statvfs("/dev/shm").f_blocks

    before, after, size, then = in_child(remounted, shm="size=3m,mode=1777")
    assert (before, after) == ("never", "advise")
    assert size == then


@needs_systemd_analyze
@pytest.mark.parametrize(
    ("line", "said"),
    [("ProtectKernelMods=yes", "Unknown key"), ("WatchdogSec=soon", "Failed to parse"), ("Type=notified", "Failed")],
)
def test_systemd_would_name_a_mistake(tmp_path: Path, line: str, said: str) -> None:
    broken = UNIT.read_text().replace("\n[Service]\n", f"\n[Service]\n{line}\n")
    assert any(said in complaint for complaint in verify(broken, tmp_path))


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_is_a_system_user_without_shell_and_home(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    conf = SYSTEMD / "ftd.sysusers.conf"
    command = ["systemd-sysusers", f"--root={tmp_path}", str(conf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name, _, uid, _, _, home, shell = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert (name, home, Path(shell).name) == ("ftd", "/", "nologin")
    assert 0 < int(uid) < 1000
    assert (tmp_path / "etc" / "group").read_text().startswith("ftd:")
