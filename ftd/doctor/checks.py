"""What is judged of a host, and what to do about it. Pure: facts in, verdicts out.

Failed is what keeps a daemon from starting or a GPU from being used. A warning is what costs speed, room or the
weights' lives later. What is merely absent, such as a GPU, is well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ftd.doctor.facts import Gpus, Host, Memory, Shm, User
from ftd.shm.names import SHM_DIR
from ftd.units import GIB, format_bytes

HUGE_UNIT = "ftd-huge-pages.service"
FSTAB_LINE = f"tmpfs {SHM_DIR} tmpfs nosuid,nodev,huge=advise 0 0"

#: F_OFD_SETLK, by which a daemon proves that it lives (fcntl(2)).
_KERNEL_NEEDED = (3, 15)
#: pidfd_open, by which `ftd stop --force` kills nobody else (pidfd_open(2)).
_KERNEL_WANTED = (5, 3)
#: No model that is worth sharing is smaller; docker's default for /dev/shm is 64 MiB.
_SMALL_SHM_BYTES = 1 * GIB


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One judgement.

    Attributes:
        remedy: empty where all is well.
    """

    name: str
    verdict: Verdict
    found: str
    expected: str
    remedy: str = ""


def judge(host: Host) -> list[Check]:
    """Every check, always all of them and in the same order."""
    return [
        _kernel(host.kernel),
        _shm(host.shm),
        _huge_pages(host.shm),
        _memory(host.memory, host.shm),
        _memlock(host.memory, host.gpus),
        _runtime_dir(host),
        _gpus(host.gpus),
        _nodes(host.gpus),
        _read_only(host.gpus),
        _logind(host.user),
        _numa(host.nodes),
        _strangers(host),
    ]


def _kernel(version: tuple[int, int]) -> Check:
    found, expected = "Linux {}.{}".format(*version), "Linux {}.{} or later".format(*_KERNEL_WANTED)
    if version >= _KERNEL_WANTED:
        return Check("kernel", Verdict.OK, found, expected)
    if version >= _KERNEL_NEEDED:
        return Check("kernel", Verdict.WARNING, found, expected, "`ftd stop --force` needs a newer kernel")
    return Check("kernel", Verdict.FAILED, found, expected, "nothing works without open-file-description locks")


def _shm(shm: Shm) -> Check:
    name, expected = "shm", f"a writable tmpfs at {SHM_DIR} that holds the weights"
    if shm.kind != "tmpfs":
        found = f"{shm.kind} is mounted there" if shm.kind else "nothing is mounted there"
        return Check(name, Verdict.FAILED, found, expected, f"mount -t tmpfs -o mode=1777 tmpfs {SHM_DIR}")
    found = f"tmpfs, {format_bytes(shm.free_bytes)} free of {format_bytes(shm.bytes)}, {shm.owner}"
    if not shm.writable:
        return Check(name, Verdict.FAILED, f"not writable: {found}", expected, f"chmod 1777 {SHM_DIR}")
    if shm.bytes < _SMALL_SHM_BYTES:
        remedy = (
            f"mount -o remount,size=<bytes> {SHM_DIR}; in a container --shm-size or --ipc=host, in a pod an emptyDir of"
            " medium Memory with a sizeLimit"
        )
        return Check(name, Verdict.WARNING, found, expected, remedy)
    return Check(name, Verdict.OK, found, expected)


def _huge_pages(shm: Shm) -> Check:
    name, expected = "huge-pages", "advise, within_size or always: loading is several times faster"
    if shm.obstacle is not None:
        remedy = shm.obstacle.remedy
        if shm.obstacle.by_mount:
            remedy += f"; for good: systemctl enable --now {HUGE_UNIT} (systemd/), or in /etc/fstab: {FSTAB_LINE}"
        return Check(name, Verdict.WARNING, shm.obstacle.found, shm.obstacle.expected, remedy)
    found = f"{SHM_DIR} is mounted with huge={shm.huge}"
    if shm.thp_off:
        found += ", but this process may not have them (THP_enabled is 0)"
        remedy = "start from a shell or container that does not set PR_SET_THP_DISABLE"
        return Check(name, Verdict.WARNING, found, expected, remedy)
    return Check(name, Verdict.OK, found, expected)


def _memory(memory: Memory, shm: Shm) -> Check:
    name, expected = "memory", "a memory cgroup, if any, that admits what /dev/shm has free"
    found = f"{format_bytes(memory.available_bytes)} available"
    limit = memory.cgroup_free_bytes
    if limit is None:
        return Check(name, Verdict.OK, f"{found}, no cgroup limit", expected)
    found += f", the memory cgroup admits {format_bytes(limit)}"
    if limit >= min(shm.free_bytes, memory.available_bytes):
        return Check(name, Verdict.OK, found, expected)
    remedy = "pages of /dev/shm count in the daemon's cgroup: raise MemoryMax= of the unit, or the container's limit"
    return Check(name, Verdict.WARNING, found, expected, remedy)


def _memlock(memory: Memory, gpus: Gpus) -> Check:
    name, expected = "memlock", "unlimited, where no GPU pins the weights"
    found = "unlimited" if memory.memlock_bytes is None else format_bytes(memory.memlock_bytes)
    if memory.may_lock:
        found += ", which CAP_IPC_LOCK overrides"
    if memory.memlock_bytes is None or memory.may_lock:
        return Check(name, Verdict.OK, found, expected)
    if not gpus.problem:
        return Check(name, Verdict.OK, f"{found}, which CUDA's pinning does not need", expected)
    remedy = (
        "LimitMEMLOCK=infinity in systemd (the shipped unit has it), --ulimit memlock=-1 in docker, memlock in"
        " /etc/security/limits.conf"
    )
    return Check(name, Verdict.WARNING, found, expected, remedy)


def _runtime_dir(host: Host) -> Check:
    name, expected = "runtime-dir", "a local directory that only its owner may write"
    seen = "; ".join(f"{d.path}: {d.problem or 'usable'} ({d.owner or 'not made yet'})" for d in host.rundirs)
    candidates = host.rundirs[:1] if host.given_rundir else host.rundirs
    if any(candidate.problem is None for candidate in candidates):
        return Check(name, Verdict.OK, seen, expected)
    remedy = "set FTD_RUNTIME_DIR to a directory of yours (chmod go-w), or run the shipped unit, whose /run/ftd is made"
    return Check(name, Verdict.FAILED, seen, expected, remedy)


def _gpus(gpus: Gpus) -> Check:
    name, expected = "gpu", "every GPU of the host visible through CUDA, or none"
    visible = "" if gpus.visible_devices is None else f", CUDA_VISIBLE_DEVICES={gpus.visible_devices!r}"
    if not gpus.driver:
        return Check(name, Verdict.OK, f"no NVIDIA driver{visible}: weights are pinned by mlock", expected)
    found = f"driver {gpus.driver}, {len(gpus.read_only)} of {gpus.present} visible{visible}"
    if not gpus.problem:
        return Check(name, Verdict.OK, f"{found}, {gpus.libcudart}", expected)
    found = f"{found}: {gpus.problem}"
    if not gpus.libcudart:
        remedy = "install torch with CUDA, or nvidia-cuda-runtime, beside ftd; until then weights are pinned by mlock"
        return Check(name, Verdict.WARNING, found, expected, remedy)
    if gpus.visible_devices is not None:
        remedy = "unset CUDA_VISIBLE_DEVICES, unless it is to hide every GPU"
        return Check(name, Verdict.WARNING, found, expected, remedy)
    return Check(name, Verdict.FAILED, found, expected, "see gpu-nodes, nvidia-smi and the kernel's log")


def _nodes(gpus: Gpus) -> Check:
    name, expected = "gpu-nodes", "/dev/nvidiactl, /dev/nvidia-uvm and a /dev/nvidia<n>, open to this user"
    if not gpus.driver:
        return Check(name, Verdict.OK, "none needed", expected)
    wrong = [f"{node} is missing" for node in gpus.missing] + [f"{node} is closed" for node in gpus.closed]
    if not wrong:
        return Check(name, Verdict.OK, "all there", expected)
    # in some containers the nodes have other names: who can use CUDA has what it takes
    verdict = Verdict.FAILED if gpus.problem else Verdict.OK
    remedy = "nvidia-modprobe -c 0 -u on the host; --gpus all in docker; DeviceAllow= as in systemd/ftd@.service"
    return Check(name, verdict, ", ".join(wrong), expected, remedy if gpus.problem else "")


def _read_only(gpus: Gpus) -> Check:
    name, expected = "read-only-registration", "followers may pin weights that they cannot write"
    if not gpus.read_only:
        return Check(name, Verdict.OK, "no GPU", expected)
    lacking = [str(ordinal) for ordinal, supported in enumerate(gpus.read_only) if not supported]
    if not lacking:
        return Check(name, Verdict.OK, "supported", expected)
    found = f"not supported by GPU {', '.join(lacking)}"
    return Check(name, Verdict.WARNING, found, expected, "nothing: copies go through a staging ring, slower and right")


def _logind(user: User) -> Check:
    name, expected = "logind", "shared memory that outlives its user's sessions"
    if not user.removes_ipc:
        return Check(name, Verdict.OK, "no logind, or RemoveIPC=no", expected)
    if user.is_system:
        return Check(name, Verdict.OK, f"RemoveIPC=yes, which spares system users such as {user.name}", expected)
    if user.lingers:
        return Check(name, Verdict.OK, f"RemoveIPC=yes, and {user.name} lingers", expected)
    return Check(
        name,
        Verdict.WARNING,
        f"RemoveIPC=yes: weights that {user.name} publishes are deleted at the end of his last session",
        expected,
        f"run the shipped unit, whose user is a system user; or loginctl enable-linger {user.name}; or RemoveIPC=no in"
        " /etc/systemd/logind.conf",
    )


def _numa(nodes: tuple[int, ...]) -> Check:
    name, expected = "numa", "any; with several nodes `numa: interleave` or `bind:<node>` says where weights lie"
    if not nodes:
        return Check(name, Verdict.OK, "a kernel without NUMA", expected)
    found = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"
    return Check(name, Verdict.OK, f"{found} with memory", expected)


def _strangers(host: Host) -> Check:
    name, expected = "namespaces", "published by this user, root, or the owner of a runtime directory"
    if not host.strangers:
        return Check(name, Verdict.OK, "none of others", expected)
    found = ", ".join(f"{namespace} of {user}" for namespace, user in sorted(host.strangers.items()))
    remedy = "workers of this user refuse them: set FTD_RUNTIME_DIR to that daemon's runtime directory if it is meant"
    return Check(name, Verdict.WARNING, found, expected, remedy)


def troubles(checks: list[Check]) -> Iterator[Check]:
    """What is not well, the worst first."""
    for verdict in (Verdict.FAILED, Verdict.WARNING):
        yield from (check for check in checks if check.verdict is verdict)
