"""What was seen of a host: plain values, so that every judgement can be tried on hosts that nobody has at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftd.shm.segment import HugeObstacle


@dataclass(frozen=True, slots=True)
class Shm:
    """/dev/shm.

    Attributes:
        kind: type of the filesystem that is mounted there; empty where none is.
        owner: `user mode`, for people.
        huge: the mount's option.
        obstacle: what keeps all pages of new segments small.
        thp_off: whether this process was denied huge pages (prctl(2), PR_SET_THP_DISABLE), which children inherit.
    """

    kind: str
    bytes: int
    free_bytes: int
    owner: str
    writable: bool
    huge: str
    obstacle: HugeObstacle | None
    thp_off: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """What bounds memory beside /dev/shm.

    Attributes:
        cgroup_free_bytes: None without a limit.
        memlock_bytes: soft limit; None without one.
        may_lock: CAP_IPC_LOCK, over the limit.
    """

    available_bytes: int
    cgroup_free_bytes: int | None
    memlock_bytes: int | None
    may_lock: bool


@dataclass(frozen=True, slots=True)
class RunDir:
    """A candidate for the runtime directory.

    Attributes:
        owner: `user:group mode`; None where it does not exist.
        problem: why a daemon of this user would not take it.
    """

    path: str
    owner: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Gpus:
    """NVIDIA's driver, its device nodes and CUDA's runtime, seen without making a context.

    Attributes:
        driver: its version; empty where it is not loaded.
        present: GPUs that the driver knows.
        visible_devices: CUDA_VISIBLE_DEVICES as it is given: ordinals, UUIDs, MIG names, nothing.
        missing, closed: device nodes that are not there, or not open to this user.
        libcudart: path of the library; empty where none was found.
        problem: why the runtime cannot be used; empty where it can.
        read_only: of each visible GPU, whether it registers memory that may not be written.
    """

    driver: str
    present: int
    visible_devices: str | None
    missing: tuple[str, ...]
    closed: tuple[str, ...]
    libcudart: str
    problem: str
    read_only: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class User:
    """Who asks, and what logind does to his shared memory.

    Attributes:
        removes_ipc: logind runs, with RemoveIPC= on.
        lingers: his user manager outlives his sessions (loginctl(1)).
    """

    name: str
    is_system: bool
    removes_ipc: bool
    lingers: bool


@dataclass(frozen=True, slots=True)
class Host:
    """Everything.

    Attributes:
        kernel: major and minor version.
        nodes: NUMA nodes with memory.
        given_rundir: whether FTD_RUNTIME_DIR is set, so that its is the only candidate of a daemon.
        strangers: namespaces of users whom a worker of this user does not believe, with their names.
        versions: of everything that a report of a fault should name.
    """

    kernel: tuple[int, int]
    shm: Shm
    memory: Memory
    rundirs: tuple[RunDir, ...]
    given_rundir: bool
    gpus: Gpus
    user: User
    nodes: tuple[int, ...]
    strangers: Mapping[str, str]
    versions: Mapping[str, str | None]
