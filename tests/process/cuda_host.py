"""A host whose GPUs are a stand-in (tests/fake_cudart): a daemon and a follower that find it as they would libcudart.

Both are whole processes, and everything above the CUDA calls runs as written.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ftd_client
from ftd.cuda.runtime import Cudart
from ftd.errors import PushRefusedError
from ftd.shm.layout import Extent
from ftd.units import MIB
from ftd_client.creator import Creator
from ftd_client.load.arenas import Run
from ftd_client.load.pull import Copy, pull
from ftd_client.load.push import Inquiry, Landing, Pushing
from ftd_client.stream import pinner
from ftd_client.stream.shared import SharedHost, shared_host
from tests.process.daemons import wait_for
from tests.process.workers import Worker, resident

SOURCE = Path(__file__).parents[1] / "fake_cudart" / "cudart.c"
#: Registered at once by daemons of these tests, in place of 1 GiB: so a small model has several chunks.
CHUNK_BYTES = 32 * MIB
_SMALL_CHUNKS = f"import ftd.cuda.pin\n\nftd.cuda.pin.CHUNK_BYTES = {CHUNK_BYTES}\n"


class Role:
    """Processes that share what they are told and what they tell.

    Attributes:
        environ: makes a process one of them.
    """

    def __init__(self, directory: Path, library: Path, memory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.environ = {
            "LD_PRELOAD": str(library),
            "FAKE_CUDART": str(directory),
            "FAKE_CUDART_MEMORY": str(memory),
        }

    def say(self, *lines: str) -> None:
        """What fails from now on, in running processes too: lines of `control`, see tests/fake_cudart/cudart.c."""
        new = self._directory / "control.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._directory / "control")

    def told(self, word: str) -> list[list[str]]:
        """Lines of `calls` that begin with the word, without it and the pid."""
        path = self._directory / "calls"
        rows = [line.split()[1:] for line in path.read_text().splitlines()] if path.exists() else []
        return [row[1:] for row in rows if row[0] == word]

    def forget(self) -> None:
        self.say()
        (self._directory / "calls").unlink(missing_ok=True)


class CudaHost:
    """The host. `worker` is a follower's process on it."""

    def __init__(self, directory: Path) -> None:
        self.memory = directory / "memory"
        self.memory.mkdir()
        library = _build(directory)
        self.daemon = Role(directory / "daemon", library, self.memory)
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(_SMALL_CHUNKS)
        paths = [str(directory / "site"), os.environ.get("PYTHONPATH")]
        self.daemon.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.follower = Role(directory / "follower", library, self.memory)
        self.worker = Worker(self.follower.environ)

    def do(self, what: Callable[..., dict[str, str]], namespace: str) -> dict[str, str]:
        """`push` or `pull` in the follower: digests of the tensors as they are in its device memory."""
        found: dict[str, str] = self.worker.do(what, namespace, os.environ["FTD_RUNTIME_DIR"])
        return found

    def check(self) -> None:
        """After each test: what no process may do, whatever was refused."""
        for role in (self.daemon, self.follower):
            assert not role.told("PENDING"), "an error was left for the next call"
            assert not role.told("FREED"), "memory was freed under a push"
        assert not list(self.memory.iterdir())


def _build(directory: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler, for the stand-in of libcudart")
    library = directory / "libcudart.so.13"
    # by this name it is libcuda too: the loader gives whom asks for that what is loaded already
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-pthread"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
    return library


# --- what the follower is told ------------------------------------------------------------------------------------

_kept: list[Cudart] = []


def _cudart() -> Cudart:
    if not _kept:
        path = os.environ["LD_PRELOAD"]
        _kept.append(Cudart(ctypes.CDLL(path), ctypes.PyDLL(path)))
    return _kept[0]


def _allocate(nbytes: int) -> int:
    address = ctypes.c_void_p()
    assert ctypes.CDLL(os.environ["LD_PRELOAD"]).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    return address.value or 0


def _free(address: int) -> None:
    assert ctypes.CDLL(os.environ["LD_PRELOAD"]).cudaFree(ctypes.c_void_p(address)) == 0


def _digests(weights: ftd_client.Follower, addresses: list[int]) -> dict[str, str]:
    def digest(extent: Extent) -> str:
        return hashlib.sha256(ctypes.string_at(addresses[extent.segment] + extent.offset, extent.nbytes)).hexdigest()

    return {placed.spec.name: digest(placed.extent) for placed in weights.manifest.tensors}


def push(namespace: str, runtime_dir: str) -> dict[str, str]:
    """All segments into memory of this process, by the daemon."""
    os.environ["FTD_RUNTIME_DIR"] = runtime_dir
    cuda = _cudart()
    with ftd_client.attach(namespace, timeout=30) as weights:
        segments = weights.manifest.segments
        addresses = [_allocate(segment.bytes) for segment in segments]
        try:
            landings = [
                Landing(address, [Run(0, number, 0, segment.bytes)])
                for number, (address, segment) in enumerate(zip(addresses, segments, strict=True))
            ]
            inodes = [segment.inode for segment in segments]
            creator = Inquiry(namespace).creator()
            if not isinstance(creator, Creator):
                raise PushRefusedError(creator)
            pushing = Pushing(weights.generation, inodes, cuda, 0, landings)
            pushing.start(creator)
            pushing.run()
            return _digests(weights, addresses)
        finally:
            for address in addresses:
                _free(address)


def pull_all(namespace: str, runtime_dir: str) -> dict[str, str]:
    """The same, by threads of this process; and it made no copy of the segments for itself."""
    os.environ["FTD_RUNTIME_DIR"] = runtime_dir
    with ftd_client.attach(namespace, timeout=30) as weights:
        shared = weights.weights.shared
        addresses = [_allocate(mapped.nbytes) for mapped in shared]
        try:
            copies = [Copy(to, mapped.address, mapped.nbytes) for to, mapped in zip(addresses, shared, strict=True)]
            pull(_cudart(), 0, copies, threads=2)
            held = resident(namespace)
            assert held["Private_Dirty"] == held["Anonymous"] == 0, held
            return _digests(weights, addresses)
        finally:
            for address in addresses:
                _free(address)


@dataclass(frozen=True)
class Seen:
    """Of a follower's host while it is open: see `SharedHost`."""

    kind: str
    pinned_bytes: int
    total_bytes: int
    refusal: str


def stream(namespace: str, runtime_dir: str, hosts: int = 1) -> list[Seen]:
    """Page-locks all weights for so many models of this follower at once; and it made no copy of the segments."""
    os.environ["FTD_RUNTIME_DIR"] = runtime_dir
    with pytest.MonkeyPatch.context() as patch, ftd_client.attach(namespace, timeout=30) as weights:
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())  # torch has no CUDA here
        patch.setattr(pinner, "CHUNK_BYTES", CHUNK_BYTES)
        names = [placed.spec.name for placed in weights.manifest.tensors]
        sources = [(mapped.address, mapped.nbytes) for mapped in weights.weights.shared]
        total = sum(nbytes for _, nbytes in sources)
        opened = [shared_host(weights.weights, names, pin=True, device=torch.device("cuda", 0)) for _ in range(hosts)]
        try:
            for host in opened:
                host.want(sources)
                wait_for("an end of pinning", lambda host=host: _has_ended(host, total))
            held = resident(namespace)
            assert held["Private_Dirty"] == held["Anonymous"] == 0, held
            refusals = [host._pinner.refusal if host._pinner is not None else "no pinner" for host in opened]
            return [
                Seen(host.kind, host.pinned_bytes, total, refusal)
                for host, refusal in zip(opened, refusals, strict=True)
            ]
        finally:
            for host in opened:
                host.close()


def _has_ended(host: SharedHost, total: int) -> bool:
    return host._pinner is None or bool(host._pinner.refusal) or host.pinned_bytes == total
