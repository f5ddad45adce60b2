"""Publish, attach and share: `python -m tests.bench.attach [--gib 4] [--tensors 1000] [--followers 8]`.

Prints, with the machine: attach time; materialization from the page cache against a plain multi-threaded copy of the
same bytes into fresh shared memory, in turns; host memory of all followers together. With a GPU also `pin: cuda` and
a load to `cuda:0`, compared bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ftd.shm.segment import Access, Segment, huge_policy
from tests.bench import checkpoint, machine

MIB = 1 << 20
MADV_POPULATE_READ = 22  # <bits/mman-map-flags-generic.h>, Linux 5.14
NAMESPACE = f"bench-{os.getpid()}"


@contextmanager
def daemon(model: Path, *sets: str) -> Iterator[dict]:
    """A daemon for the body; gives its status."""
    flags = [part for text in sets for part in ("--set", text)]
    begun = time.perf_counter()
    _ftd("start", "-n", NAMESPACE, "--model", str(model), "--detach", *flags)
    start_s = time.perf_counter() - begun
    try:
        yield json.loads(_ftd("status", "-n", NAMESPACE, "--json")) | {"start_s": start_s}
    finally:
        _ftd("stop", "-n", NAMESPACE)


def _ftd(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ftd", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ftd {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def plain_copy(path: Path, threads: int) -> float:
    """Seconds that `threads` threads take to memcpy the file's cached pages into fresh shared memory (2 MiB pages
    where the mount gives them)."""
    size = path.stat().st_size
    with Segment.create(f"/ftd-bench-{os.getpid()}", size, Access()) as segment, path.open("rb") as file:
        # writable for ctypes only; faulted in before the clock starts: the copy is not to pay for the source's faults
        source = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        source.madvise(MADV_POPULATE_READ)
        target = segment.map_shared(writable=True, huge=huge_policy() != "never")
        try:
            to = ctypes.addressof(ctypes.c_char.from_buffer(target))
            start = ctypes.addressof(ctypes.c_char.from_buffer(source))
            step = 16 * MIB

            def copy(at: int) -> None:
                ctypes.memmove(to + at, start + at, min(step, size - at))  # without the interpreter lock

            begun = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(copy, range(0, size, step)))
            return time.perf_counter() - begun
        finally:
            segment.unlink()


def materialize(path: Path, rounds: int) -> tuple[float, float]:
    """(plain copy, ftd) in bytes per second: medians of `rounds` in turns, as many threads each, nothing pinned."""
    threads = min(16, len(os.sched_getaffinity(0)))
    plain, ours = [], []
    size = path.stat().st_size
    for _ in range(rounds):
        plain.append(size / plain_copy(path, threads))
        with daemon(path, "pin=none", f"read_threads={threads}") as status:
            ours.append(status["progress"]["bytes_per_s"])
    return statistics.median(plain), statistics.median(ours)


FOLLOWER = """
import json, os, sys, time, resource
import ftd_client, torch
times = []
for _ in range(21):
    begun = time.perf_counter()
    weights = ftd_client.attach(sys.argv[1])
    times.append(time.perf_counter() - begun)
    kept = weights
    if len(times) < 21:
        weights.close()
begun = time.perf_counter()
tensors = kept.state_dict()
state_s = time.perf_counter() - begun
# one byte of each page: every page is mapped afterwards
total = sum(int(t.reshape(-1).view(torch.uint8)[::4096].sum(dtype=torch.int64)) for t in tensors.values())
print(json.dumps({"attach": times, "state_dict": state_s, "sum": total}), flush=True)
sys.stdin.readline()
"""


def share(followers: int) -> tuple[list[dict], int, int, int]:
    """Reports of the followers, and, while all hold every page mapped, the PSS summed over the segments' mappings of
    followers and daemon, their page tables, and the followers' private memory; bytes."""
    status = json.loads(_ftd("status", "-n", NAMESPACE, "--json"))
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(followers)
    ]
    reports = [json.loads(child.stdout.readline()) for child in begun]
    pids = [child.pid for child in begun]
    pss = sum(_mapping_pss(pid) for pid in [*pids, status["pid"]])
    tables = sum(_field(Path(f"/proc/{pid}/status"), "VmPTE:") for pid in pids)
    private = sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Private_Dirty:") for pid in pids)
    for child in begun:
        child.communicate("\n")
    return reports, pss, tables, private


def _mapping_pss(pid: int) -> int:
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = f"/dev/shm/ftd.{NAMESPACE}.g" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))


GPU = """
import json, sys, time
import ftd_client, torch
from torch import nn
weights = ftd_client.attach(sys.argv[1])
quiet = not torch.cuda.is_initialized()
names = list(weights.manifest.tensors)
with torch.device("meta"):
    model = nn.Module()
for placed in names:
    owner = model
    *path, leaf = placed.spec.name.split(".")
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner._modules[part]
    owner.register_parameter(leaf, nn.Parameter(torch.empty(placed.spec.shape, device="meta"), requires_grad=False))
torch.cuda.init()
begun = time.perf_counter()
report = weights.load(model, "cuda:0")
torch.cuda.synchronize()
seconds = time.perf_counter() - begun
views = weights.state_dict()
equal = all(  # as integers: random bytes are NaNs too
    torch.equal(p.detach().cpu().view(torch.int16), views[n].view(torch.int16)) for n, p in model.named_parameters()
)
pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
best = 0
for _ in range(5):
    torch.cuda.synchronize()
    t = time.perf_counter()
    target.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    best = max(best, (1 << 30) / (time.perf_counter() - t))
print(json.dumps({"equal": equal, "rate": report.bytes / seconds, "limit": best, "quiet": quiet}))
"""


def to_gpu() -> dict:
    done = subprocess.run([sys.executable, "-c", GPU, NAMESPACE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is stopped and the files go
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=4.0)
    options.add_argument("--tensors", type=int, default=1000)
    options.add_argument("--followers", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as folder:
        path = Path(folder) / "model.safetensors"
        size = checkpoint.write(path, int(asked.gib * 2**30), asked.tensors)
        plain, ours = materialize(path, asked.rounds)
        rows = [
            ("weights", f"{size / 2**30:.2f} GiB in {asked.tensors} tensors", ""),
            ("plain copy into fresh shared memory", f"{plain / 1e9:.2f} GB/s", ""),
            (
                "materialize: first to last byte in place",
                f"{ours / 1e9:.2f} GB/s",
                f"{ours / plain:.2f} of it (goal ≥ 0.8)",
            ),
        ]
        with daemon(path) as status:
            segment = status["segments"][0]
            rows.append(
                ("pages, pin", f"{100 * segment['huge_bytes'] / segment['bytes']:.0f} % huge", f"pin {status['pin']}")
            )
            rows.append(("`ftd start --detach` until ready, pinned", f"{status['start_s']:.2f} s", "(whole process)"))
            reports, pss, tables, private = share(1)
            times = sorted(report * 1e3 for report in reports[0]["attach"][1:])
            first = reports[0]["attach"][0] * 1e3
            rows += [
                ("attach, first in a process", f"{first:.1f} ms", "(goal ≤ 10 ms)"),
                ("attach, again: median, max of 20", f"{statistics.median(times):.1f}, {times[-1]:.1f} ms", ""),
                ("state_dict of all tensors", f"{reports[0]['state_dict'] * 1e3:.1f} ms", ""),
            ]
            reports, pss, tables, private = share(asked.followers)
            assert len({report["sum"] for report in reports}) == 1, "followers read different weights"
            rows += [
                (f"PSS of the segments, {asked.followers} followers and daemon", f"{pss / 2**30:.3f} GiB",
                 f"{pss / size:.3f} × weights (goal ≤ 1.02)"),
                ("page tables of the followers", f"{tables / 2**20:.1f} MiB", ""),
                ("private memory of the followers", f"{private / 2**20:.0f} MiB", "(torch itself)"),
            ]  # fmt: skip
            if torch.cuda.is_available():
                found = to_gpu()
                share_of_link = f"{found['rate'] / found['limit']:.2f} of {found['limit'] / 1e9:.1f} GB/s H2D pinned"
                rows.append(("load to cuda:0, pageable copies", f"{found['rate'] / 1e9:.1f} GB/s", share_of_link))
                rows.append(("bit-equal on the GPU", "yes" if found["equal"] else "NO", ""))
                rows.append(("attach left CUDA alone", "yes" if found["quiet"] else "NO", ""))
    for name, value in machine.facts():
        print(f"{name + ':':12}{value}")
    print("\n| what | measured | |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
