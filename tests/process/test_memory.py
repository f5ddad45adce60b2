"""What attaching costs, and who sees a change: nothing, and nobody else."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import ftd_client
from ftd.units import MIB
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, digests, hollow
from tests.process.daemons import PATIENCE_S, Daemon, ftd, holding
from tests.process.workers import Worker, bytes_of

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def test_attaching_touches_no_weight_page(start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
    """64 MiB, mapped for views and for DMA, every tensor of it made: no page is resident, and none is committed."""
    start("--model", hollow(tmp_path, 64))
    follower = worker()
    follower.do(workers.attach, namespace)
    names = follower.do(workers.touch_nothing, namespace)
    assert len(names) == 64
    mapped = follower.do(workers.resident, namespace)
    assert mapped == {"Size": 2 * 64 * MIB, "Rss": 0, "Private_Dirty": 0, "Anonymous": 0}
    follower.do(workers.read_one, namespace, "layers.7.weight")
    mapped = follower.do(workers.resident, namespace)
    assert 0 < mapped["Rss"] <= 4 * MIB and mapped["Anonymous"] == 0, "reading shares the daemon's pages"


class TestChangesInPlace:
    """MD-12: a view may be written to, and only its writer sees it."""

    def test_reach_nobody(self, start: Start, worker: Workers, namespace: str, model: Path) -> None:
        start("--model", model)
        writer, reader = worker(), worker()
        for follower in (writer, reader):
            follower.do(workers.attach, namespace)
        assert reader.do(workers.contents, namespace) == TINY_DIGESTS
        assert writer.do(workers.overwrite, namespace) == [1.0]
        assert reader.do(workers.contents, namespace) == TINY_DIGESTS, "not the one that has read before"
        late = worker()
        late.do(workers.attach, namespace)
        assert late.do(workers.contents, namespace) == TINY_DIGESTS, "nor the one that comes after"
        changed = writer.do(workers.contents, namespace)
        assert set(changed) == set(TINY_DIGESTS) and changed != TINY_DIGESTS
        writer.do(workers.attach, namespace)
        assert writer.do(workers.contents, namespace) == TINY_DIGESTS, "a new attach of the writer is fresh"

    def test_cost_the_pages_that_were_written(
        self, start: Start, worker: Workers, namespace: str, tmp_path: Path
    ) -> None:
        start("--model", hollow(tmp_path, 16))
        follower = worker()
        follower.do(workers.attach, namespace)
        follower.do(workers.write_one, namespace, "layers.3.weight")
        mapped = follower.do(workers.resident, namespace)
        assert MIB <= mapped["Anonymous"] <= 2 * MIB


def test_tensors_survive_everything(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """SH-04, ST-25: closed, the daemon stopped, another one in its place: the tensors are what they were."""
    daemon = start("--model", model)
    follower = worker()
    follower.do(workers.attach, namespace)
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    follower.do(workers.close, namespace)
    assert daemon.terminate() == 0
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    start("--model", model)
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    assert holding(follower.pid, namespace) == {"g1.0"}


def test_the_checkpoint_may_change_afterwards(start: Start, namespace: str, tmp_path: Path, model: Path) -> None:
    """ST-25 (b): what was published does not depend on the files any more."""
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((model / "model.safetensors").read_bytes())
    start("--model", copy)
    with ftd_client.attach(namespace, timeout=0) as weights:
        copy.write_bytes(bytes(copy.stat().st_size))
        copy.unlink()
        assert digests({n: bytes_of(t) for n, t in weights.state_dict().items()}) == TINY_DIGESTS
    with ftd_client.attach(namespace, timeout=0) as weights:
        assert digests({n: bytes_of(t) for n, t in weights.state_dict().items()}) == TINY_DIGESTS


def test_views_are_plain_tensors(start: Start, namespace: str, model: Path) -> None:
    """MD-11: copied, pickled, cast and moved like any other; each at a multiple of 64 bytes (ST-08)."""
    start("--model", model)
    with ftd_client.attach(namespace, timeout=0) as weights:
        state = weights.state_dict()
        assert [(t.dtype, tuple(t.shape)) for t in state.values()] == [
            (torch.float32, (16, 8)), *[(torch.bfloat16, (8, 8))] * 3,
        ]  # fmt: skip
        for tensor in state.values():
            assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() and not tensor.requires_grad
            assert torch.equal(tensor.clone(), tensor)
            assert torch.equal(tensor.to(torch.float64).to(tensor.dtype), tensor)


IMPORT = """
import json, os, sys, threading
import ftd_client, torch
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "threads": len(threading.enumerate()),
    "daemon": sorted(n for n in sys.modules if n.startswith(("ftd.daemon", "ftd.cli", "ftd.source", "pydantic"))),
}))
"""


def test_importing_the_client_starts_nothing() -> None:
    """CU-15: no CUDA, no thread, and nothing of the daemon."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert json.loads(done.stdout) == {"cuda": False, "threads": 1, "daemon": []}, done.stderr


#: What a health check must not pay for.
HEAVY = ("torch", "asyncio", "pydantic", "numpy", "yaml", "filelock", "psutil")
QUICK_STATUS_S = 0.2

STATUS = """
import sys
sys.argv = ["ftd", "status", "-n", {namespace!r}, *{arguments!r}]
from ftd.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, *[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


def test_status_is_light(start: Start, namespace: str, model: Path) -> None:
    """`ftd status` loads neither torch nor asyncio nor pydantic, and is done in 200 ms on an idle machine.

    A test's machine is never idle: its processor time is held against twice the promise, and the wall time is printed.
    """
    start("--model", model)
    for arguments in ([], ["--json"]):
        script = STATUS.format(namespace=namespace, arguments=arguments, heavy=HEAVY)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stderr.split() == ["0"]
        runs = [_timed(namespace, arguments) for _ in range(4)]
        wall_s, cpu_s = (min(run[i] for run in runs) for i in (0, 1))
        print(f"ftd status {' '.join(arguments)}: {1000 * wall_s:.0f} ms, of processor time {1000 * cpu_s:.0f} ms")
        assert cpu_s < 2 * QUICK_STATUS_S


def _timed(namespace: str, arguments: list[str]) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = ftd("status", "-n", namespace, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.status == 0
    return result.wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
