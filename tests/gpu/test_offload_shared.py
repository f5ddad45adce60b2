"""Streaming a daemon's weights to a GPU: right before, while and after they are page-locked, or if they never are."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError, Cudart, load_runtime
from ftd_client import OffloadConfig
from ftd_client.strategy import Plan, Problem, assemble, workloads
from ftd_client.stream import pinner
from tests.gpu.conftest import ftd, start_daemon, status_of
from tests.unit.client.load.served import eventually

safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)
NAME = "shared"
BOUND_S = 60
MIB = 2**20
WIDTH, LAYERS = 1024, 24
#: Of the grid: 48 chunks of the layers' 192 MiB.
CHUNK_BYTES = 4 * MIB


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def resident() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model().requires_grad_(False).eval()


class SecondHalf:
    """Streams it, whatever was measured: what is wanted is known, and what is resident is much."""

    name = "second_half"

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[0]
        return assemble(work, work.streamable[len(work.streamable) // 2 :], work.ring_cap, self.name)


def offloaded(namespace: str, **fields: Any) -> nn.Module:
    with torch.device("meta"):
        model = Model().requires_grad_(False).eval()
    # a budget, so that the strategy makes the first plan too
    few = {"num_blocks": 2, "min_blocks": 2, "profiling_iters": 2, "max_gpu_mem_fraction": 0.9}
    return ftd_client.offload(
        model,
        OffloadConfig(
            include_patterns=["layers.*"], shm_enabled=True, shm_namespace=namespace, load_strategy=SecondHalf(),
            **(few | fields),
        ),
        NAME,
    )  # fmt: skip


def right(model: nn.Module, expected: nn.Module, forwards: int) -> bool:
    with torch.inference_mode():
        xs = torch.randn(forwards, 8, WIDTH, device=GPU)
        found = [model(x) for x in xs]  # queued without looking, so that the host runs ahead
        return all(torch.equal(y, expected(x)) for x, y in zip(xs, found, strict=True))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "model.safetensors"
    safetensors_torch.save_file(resident().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def namespace(model_path: Path) -> Iterator[str]:
    name = f"gpu-{uuid.uuid4().hex[:8]}"
    try:
        start_daemon(name, model_path, "pin=cuda")
        yield name
    finally:
        ftd("stop", "-n", name, "--force")


@pytest.fixture(scope="module")
def expected() -> nn.Module:
    return resident().to(GPU)


@pytest.fixture
def cuda() -> Cudart:
    runtime, reason = load_runtime()
    assert isinstance(runtime, Cudart), reason
    if not runtime.device_attribute(READ_ONLY_REGISTRATION, 0):
        pytest.skip("this GPU registers no read-only memory")
    return runtime


@pytest.fixture(autouse=True)
def small_and_released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pinner, "CHUNK_BYTES", CHUNK_BYTES)
    yield
    ftd_client.release(NAME)
    assert not [t for t in threading.enumerate() if t.name in ("ftd-pin", "ftd-stage")]
    assert torch.ones(3, device=GPU).sum().item() == 3, "torch is none the wiser"


def row_of(namespace: str) -> dict[str, Any]:
    (row,) = [row for row in status_of(namespace)["followers"] if row["pid"] == os.getpid()]
    return dict(row)


def _pinning() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ftd-pin"]


def test_right_while_it_is_registered_slowly(
    namespace: str, cuda: Cudart, expected: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk goes on after each forward; the copies of its blocks are direct from then on."""
    go = threading.Semaphore(0)
    real = cuda.host_register

    def slowly(address: int, nbytes: int, *, read_only: bool = False) -> None:
        if threading.current_thread() in _pinning():
            assert go.acquire(timeout=BOUND_S)
        real(address, nbytes, read_only=read_only)

    monkeypatch.setattr(cuda, "host_register", slowly)
    model = offloaded(namespace)
    try:
        assert row_of(namespace)["pinned_bytes"] == CHUNK_BYTES, "the first chunk"
        forwards = 0
        while _pinning():
            assert right(model, expected, 1)
            forwards += 1
            go.release()
            assert forwards < 1000
    finally:
        go.release(1000)
    assert forwards > 10
    eventually("the threads of the slots to end", lambda: right(model, expected, 1) and not _stages())
    row = row_of(namespace)
    assert row["pin"] == "cuda"
    assert row["streamed_bytes"] <= row["pinned_bytes"] < 0.75 * row["planned_bytes"]
    assert right(model, expected, 20)


def _stages() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ftd-stage"]


def test_what_is_resident_comes_by_push(
    namespace: str, cuda: Cudart, expected: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    def pushed() -> int:
        return sum(row["pushed_bytes"] for row in status_of(namespace)["push"])

    before = pushed()
    with caplog.at_level(logging.INFO, logger="ftd"):
        model = offloaded(namespace)
    plan = ftd_client.get_offload_manager(NAME).plan
    assert plan is not None
    assert "they came by push" in caplog.text
    assert pushed() - before >= plan.resident_bytes > 0
    assert right(model, expected, 10)


def test_pulled_where_the_daemon_pushes_nothing(
    cuda: Cudart, expected: nn.Module, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"gpu-{uuid.uuid4().hex[:8]}"
    try:
        start_daemon(name, model_path, "pin=none")
        with caplog.at_level(logging.INFO, logger="ftd"):
            model = offloaded(name)
        assert "they came by pull" in caplog.text
        assert right(model, expected, 10)
        ftd_client.release(NAME)
    finally:
        ftd("stop", "-n", name, "--force")


@pytest.mark.parametrize("allowed", [0, 3])
def test_refused_it_is_staged_for_good(
    namespace: str, cuda: Cudart, expected: nn.Module, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """As with a limit of locked memory that only the slots keep within."""
    real, taken = cuda.host_register, 0

    def refuse(address: int, nbytes: int, *, read_only: bool = False) -> None:
        nonlocal taken
        taken += read_only
        if read_only and taken > allowed:
            raise CudaError("cudaHostRegister: out of memory (error 2)")
        real(address, nbytes, read_only=read_only)

    monkeypatch.setattr(cuda, "host_register", refuse)
    model = offloaded(namespace)
    for _ in range(4):
        assert right(model, expected, 5)
    row = row_of(namespace)
    assert (row["pin"], row["pinned_bytes"]) == ("staged", allowed * CHUNK_BYTES)


def test_refused_altogether_it_is_slow_and_right(
    namespace: str, cuda: Cudart, expected: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, nbytes: int, *, read_only: bool = False) -> None:
        raise CudaError("cudaHostRegister: out of memory (error 2)")

    monkeypatch.setattr(cuda, "host_register", refuse)
    model = offloaded(namespace)
    assert right(model, expected, 10)
    row = row_of(namespace)
    assert (row["pin"], row["pinned_bytes"]) == ("none", 0)


def test_a_real_refusal_leaves_no_error_behind(
    namespace: str, cuda: Cudart, expected: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA itself refuses from the third chunk on: what is registered twice."""
    real, last = cuda.host_register, list[tuple[int, int]]()

    def twice(address: int, nbytes: int, *, read_only: bool = False) -> None:
        if read_only and len(last) == 2:
            address, nbytes = last[0]
        real(address, nbytes, read_only=read_only)
        if read_only:
            last.append((address, nbytes))

    monkeypatch.setattr(cuda, "host_register", twice)
    model = offloaded(namespace)
    assert right(model, expected, 10)
    eventually("the refusal", lambda: not _pinning())
    assert (row_of(namespace)["pin"], len(last)) == ("staged", 2)
    assert right(model, expected, 10)


_CHILD = """
import json, sys, torch
from tests.gpu import test_offload_shared as case
namespace = sys.argv[1]
expected = case.resident().to(case.GPU)
print("ready", flush=True)
sys.stdin.readline()
case.pinner.CHUNK_BYTES = case.CHUNK_BYTES
model = case.offloaded(namespace)
first = case.right(model, expected, 1)
case.eventually("the end of pinning", lambda: not case._pinning())
rest = case.right(model, expected, 20)
row = case.row_of(namespace)
case.ftd_client.release(case.NAME)
print(json.dumps({"right": [first, rest], "pin": row["pin"], "pinned": row["pinned_bytes"],
                  "streamed": row["streamed_bytes"]}))
"""


def test_two_followers_of_one_segment_at_once(namespace: str, cuda: Cudart) -> None:
    crew = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for each in crew:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n", each.communicate()[1]
        for each in crew:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        for each in crew:
            out, err = each.communicate(timeout=BOUND_S)
            assert each.returncode == 0, err
            said = json.loads(out)
            assert (said["right"], said["pin"]) == ([True, True], "cuda")
            assert said["pinned"] >= said["streamed"] > 0
    finally:
        for each in crew:
            each.kill()
            each.communicate()


def test_an_exit_without_release_is_quiet(namespace: str, cuda: Cudart) -> None:
    """In the midst of registration, with copies under way: registrations end before their process does."""
    script = (
        "import sys, torch\n"
        "from tests.gpu import test_offload_shared as case\n"
        "case.pinner.CHUNK_BYTES = case.MIB\n"
        "model = case.offloaded(sys.argv[1])\n"
        "with torch.inference_mode():\n"
        "    model(torch.randn(8, case.WIDTH, device=case.GPU))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, namespace], capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stderr) == (0, "")
