"""Looking at the host. Changes nothing, makes no CUDA context, imports no torch, and never fails: what cannot be seen
counts as absent."""

from __future__ import annotations

import os
import platform
import re
import resource
import stat
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from ftd import rundir
from ftd._version import PROTOCOL, __version__
from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError, load_runtime
from ftd.daemon.headroom import cgroup_free_bytes
from ftd.doctor.facts import Gpus, Host, Memory, RunDir, Shm, User
from ftd.mounts import mounts
from ftd.owner import group_name, user_name
from ftd.shm.names import SHM_DIR, listed
from ftd.shm.numa import memory_nodes
from ftd.shm.segment import huge_obstacle, huge_policy

_CAP_IPC_LOCK = 14  # <linux/capability.h>
_LAST_SYSTEM_UID = 999  # systemd's default, UIDS-GIDS.md
_DRIVER_DIR = Path("/proc/driver/nvidia")
#: logind.conf(5): the first main file found; a drop-in masks those of its name in later directories.
_LOGIND_DIRS = tuple(map(Path, ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")))


def look(environ: Mapping[str, str]) -> Host:
    """This host, as a daemon that this user started with this environment would find it."""
    status = proc_status()
    gpus = _gpus(environ)
    return Host(
        kernel=kernel_version(platform.release()),
        shm=_shm(status),
        memory=_memory(status),
        rundirs=tuple(_rundir(path, problem) for path, problem in rundir.survey(environ)),
        given_rundir=bool(environ.get("FTD_RUNTIME_DIR")),
        gpus=gpus,
        user=_user(),
        nodes=memory_nodes(),
        strangers=_strangers(environ),
        versions={
            "ftd": __version__,
            "protocol": ".".join(map(str, PROTOCOL)),
            "python": platform.python_version(),
            "torch": _release("torch"),
            "kernel": platform.release(),
            "driver": gpus.driver or None,
        },
    )


def kernel_version(release: str) -> tuple[int, int]:
    """`6.1.0-18-amd64` is (6, 1)."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def proc_status() -> dict[str, str]:
    """/proc/self/status (proc(5))."""
    return dict(line.partition(":\t")[::2] for line in Path("/proc/self/status").read_text().splitlines())


def _shm(status: Mapping[str, str]) -> Shm:
    kind = next((mount.kind for mount in reversed(mounts()) if mount.path == str(SHM_DIR)), "")
    try:
        facts, space = SHM_DIR.stat(), os.statvfs(SHM_DIR)
    except OSError:
        return Shm("", 0, 0, "", writable=False, huge="never", obstacle=None, thp_off=False)
    return Shm(
        kind,
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
        f"{user_name(facts.st_uid)} mode {stat.S_IMODE(facts.st_mode):04o}",
        os.access(SHM_DIR, os.W_OK | os.X_OK, effective_ids=True),
        huge_policy(),
        huge_obstacle(),
        status.get("THP_enabled") == "0",
    )


def _memory(status: Mapping[str, str]) -> Memory:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        psutil.virtual_memory().available,
        cgroup_free_bytes(),
        None if soft == resource.RLIM_INFINITY else soft,
        bool(int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1),
    )


def _rundir(path: Path, problem: str | None) -> RunDir:
    try:
        facts = path.stat()
    except OSError:
        return RunDir(str(path), None, problem)
    owner = f"{user_name(facts.st_uid)}:{group_name(facts.st_gid)} mode {stat.S_IMODE(facts.st_mode):04o}"
    return RunDir(str(path), owner, problem)


def _gpus(environ: Mapping[str, str]) -> Gpus:
    version = re.search(r"\s(\d+\.\d+[.\d]*)\s", _text(_DRIVER_DIR / "version"))
    present = len(list(_DRIVER_DIR.glob("gpus/*")))
    nodes = {"/dev/nvidiactl", "/dev/nvidia-uvm", *(str(node) for node in Path("/dev").glob("nvidia[0-9]*"))}
    if not any(re.search(r"\d$", node) for node in nodes):
        nodes.add("/dev/nvidia0")
    there = {node for node in nodes if Path(node).exists()}
    runtime, problem = load_runtime()
    read_only: list[bool] = []
    try:
        for ordinal in range(runtime.device_count() if runtime is not None else 0):
            read_only.append(runtime is not None and runtime.device_attribute(READ_ONLY_REGISTRATION, ordinal) == 1)
    except CudaError as error:
        problem = error.message
    library = re.search(r"/\S*libcudart[-.0-9a-f]*\.so\S*", _text(Path("/proc/self/maps")))
    return Gpus(
        version[1] if version else "",
        present,
        environ.get("CUDA_VISIBLE_DEVICES"),
        tuple(sorted(nodes - there)),
        tuple(sorted(node for node in there if not os.access(node, os.R_OK | os.W_OK, effective_ids=True))),
        library[0] if library else "",
        problem,
        tuple(read_only),
    )


def _user() -> User:
    uid = os.geteuid()
    name = user_name(uid)
    removes = Path("/run/systemd/users").is_dir() and remove_ipc(_logind_texts())
    # not Path.exists: the directory may be closed to us
    lingers = os.path.exists(f"/var/lib/systemd/linger/{name}")  # noqa: PTH110
    return User(name, uid <= _LAST_SYSTEM_UID, removes, lingers)


def _logind_texts() -> list[str]:
    """logind's configuration in the order in which it counts."""
    main = next((path for folder in _LOGIND_DIRS if (path := folder / "logind.conf").is_file()), None)
    dropins: dict[str, Path] = {}
    for folder in reversed(_LOGIND_DIRS):
        dropins |= {path.name: path for path in folder.glob("logind.conf.d/*.conf")}
    return [_text(path) for path in (*([main] if main else []), *(dropins[name] for name in sorted(dropins)))]


def remove_ipc(texts: Iterable[str]) -> bool:
    """RemoveIPC= as these files of logind.conf(5) set it, the last one winning. Where none does, the shipped file
    tells the distribution's default in a comment, and systemd's own is yes."""
    words = {"#": "yes", "": ""}
    for text in texts:
        for comment, value in re.findall(r"^[ \t]*(#?)[ \t]*RemoveIPC[ \t]*=[ \t]*(\S*)[ \t]*$", text, re.MULTILINE):
            words[comment] = value or words[comment]
    return (words[""] or words["#"]).lower() in ("1", "yes", "y", "true", "t", "on")


def _strangers(environ: Mapping[str, str]) -> dict[str, str]:
    believed = {os.geteuid(), 0, *(folder.stat().st_uid for folder in rundir.client_dirs(environ))}
    found = {}
    for name in listed() if SHM_DIR.is_dir() else ():
        try:
            uid = (SHM_DIR / name.name.removeprefix("/")).lstat().st_uid
        except OSError:
            continue
        if uid not in believed:
            found[name.namespace] = user_name(uid)
    return found


def _release(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
