"""What workers are told that stream a model, and the model: small, deterministic, and with a part that stays."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ftd_client
from ftd_client import OffloadConfig
from ftd_client.strategy import AllStreamed
from tests.process.daemons import PATIENCE_S, wait_for
from tests.process.workers import bytes_of
from tests.unit.source.checkpoint_files import valid_file, write

DEFAULT = "default"


class Layer(nn.Module):
    """Two linears that stream, and a scale beside them, which is too small to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def resident(width: int, count: int) -> Model:
    """The model with its weights in memory of its own: the same bits in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        model = Model(width, count)
        with torch.no_grad():
            for layer in model.layers:
                layer.scale.copy_(torch.rand(width))
    return model.requires_grad_(False).eval()


def on_meta(width: int, count: int) -> Model:
    with torch.device("meta"):
        return Model(width, count).requires_grad_(False).eval()


def checkpoint(directory: Path, width: int, count: int) -> Path:
    tensors = {
        name: ("F32", tuple(value.shape), bytes_of(value))
        for name, value in resident(width, count).state_dict().items()
    }
    return write(directory, {"model.safetensors": valid_file(tensors)})


# --- what workers are told ---------------------------------------------------------------------------------------

_streamed: dict[str, Model] = {}
_expected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
_bound: dict[str, ftd_client.Follower] = {}
_said: list[str] = []


def manager(name: str = DEFAULT) -> Any:
    return ftd_client.get_offload_manager(name)


def config(namespace: str | None, fields: dict[str, Any]) -> OffloadConfig:
    known: dict[str, Any] = {
        "include_patterns": ["layers.*"], "pinned_memory": False, "shm_enabled": namespace is not None,
        "shm_namespace": namespace, "profiling_iters": 2, "num_blocks": 2, "min_blocks": 2,
        "load_strategy": AllStreamed(),
    }  # fmt: skip
    return OffloadConfig(**{**known, **fields})


def offload(namespace: str, size: tuple[int, int], name: str = DEFAULT, **fields: Any) -> None:
    """A model on meta, streamed from the namespace's creator."""
    model = on_meta(*size)
    _keep(model, resident(*size), name)
    ftd_client.offload(model, config(namespace, fields), name, device="cpu")


def offload_with(namespace: str, size: tuple[int, int], fields: dict[str, Any]) -> None:
    offload(namespace, size, **fields)


def offload_named(namespace: str, size: tuple[int, int], name: str) -> None:
    offload(namespace, size, name)


def _keep(model: Model, other: nn.Module, name: str) -> None:
    x = torch.linspace(-1, 1, 3 * other.head.in_features).view(3, -1)
    with torch.no_grad():
        _expected[name] = (x, other(x))
    _streamed[name] = model


def forward(name: str = DEFAULT) -> bool:
    """Whether one forward gives the resident model's bits."""
    x, expected = _expected[name]
    with torch.no_grad():
        return torch.equal(_streamed[name](x), expected)


def forwards(count: int, name: str = DEFAULT) -> bool:
    return all(forward(name) for _ in range(count))


def to_inference(name: str = DEFAULT) -> int:
    """Forwards until the inference phase, each compared; how many."""
    count = 0
    while manager(name).iters_before_inference:
        assert forward(name)
        count += 1
    return count


def forwards_until(stop: Path, begun: Path) -> tuple[int, int]:
    """Forwards until a file is there, and one more; how many, and how many of them were right."""
    right, count = int(forward()), 1
    begun.touch()
    until = time.monotonic() + PATIENCE_S
    while not stop.exists() and time.monotonic() < until:
        right, count = right + forward(), count + 1
    return count + 1, right + forward()


def placement(name: str = DEFAULT) -> dict[str, Any]:
    """What status should say of this worker."""
    plan = manager(name).plan
    return {
        "device": "cpu",
        "planned_bytes": sum(p.nbytes for p in resident_managed(name)),
        "resident_bytes": plan.resident_bytes,
        "streamed_bytes": plan.streamed_bytes,
    }


def resident_managed(name: str) -> list[torch.Tensor]:
    return list(_streamed[name].layers.parameters())


def release(name: str = DEFAULT) -> None:
    ftd_client.release(name)


def forget(name: str = DEFAULT) -> None:
    _streamed.pop(name, None)


def phase(name: str = DEFAULT) -> tuple[str, int, str]:
    """Phase, forwards before inference, and the strategy of the plan at work."""
    return str(manager(name).phase), manager(name).iters_before_inference, manager(name).plan.strategy


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _said.append(record.getMessage())


def listen() -> None:
    log = logging.getLogger("ftd")
    log.setLevel(logging.INFO)
    log.addHandler(_Listener())


def said() -> list[str]:
    return list(_said)


def stand_at(place: str, reached: Path, namespace: str, size: tuple[int, int]) -> None:
    """Offloads, and stands still when `offload()` comes to `place`."""
    module_name, _, attribute = place.rpartition(".")
    module = __import__(module_name, fromlist=[attribute])

    def stand(*_: Any, **__: Any) -> None:
        reached.touch()
        while True:
            time.sleep(1)

    setattr(module, attribute, stand)
    offload(namespace, size)


def bind_and_change(namespace: str, size: tuple[int, int]) -> None:
    """Binds a model to views, changes them in place, and streams what is there then."""
    model, other = on_meta(*size), resident(*size)
    follower = _bound[namespace] = ftd_client.attach(namespace, timeout=0)
    follower.bind(model)
    with torch.no_grad():
        for each in (model, other):
            each.layers[1].up.weight[0, 0] += 1
            each.layers[2].down.weight.data[-1] -= 1
    _keep(model, other, DEFAULT)
    ftd_client.offload(model, config(None, {}), device="cpu")


def change_and_offload_again(namespace: str) -> None:
    model = _streamed[DEFAULT]
    ftd_client.release()
    other = resident(model.head.in_features, len(model.layers))
    with torch.no_grad():
        for each in (model, other):
            each.layers[0].up.weight.data[0, 0] += 1
    _keep(model, other, DEFAULT)
    ftd_client.offload(model, config(namespace, {}), device="cpu")


def in_fork(function: Callable[[], Any], within_s: float = PATIENCE_S) -> tuple[str, str]:
    """Class and text of what `function` raises in a forked child of this worker; ("", "") where it does not."""
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "\n"
        try:
            function()
        except BaseException as error:
            text = f"{type(error).__name__}\n{error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    try:
        wait_for("the forked child's end", lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, within_s)
    except AssertionError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    with open(read, "rb") as pipe:
        kind, _, message = pipe.read().decode().partition("\n")
    return kind, message


def offload_again(namespace: str | None) -> None:
    """The same model object, which was released."""
    ftd_client.offload(_streamed[DEFAULT], config(namespace, {}), device="cpu")


def fork_and_forward() -> tuple[str, str]:
    return in_fork(forward)


def fork_within_a_forward(function: Callable[[], Any], within_s: float) -> tuple[str, str]:
    """As `in_fork`, while a thread of this worker stands in the midst of a forward; which is right nevertheless."""
    inside, onward, found = threading.Event(), threading.Event(), []

    def stand(*_: Any) -> None:
        inside.set()
        onward.wait(PATIENCE_S)

    hook = _streamed[DEFAULT].layers[3].register_forward_hook(stand)
    thread = threading.Thread(target=lambda: found.append(forward()))
    thread.start()
    try:
        assert inside.wait(PATIENCE_S)
        hook.remove()
        return in_fork(function, within_s)
    finally:
        onward.set()
        thread.join()
        assert found == [True]


def fork_and_release() -> tuple[str, str]:
    return in_fork(release)


def fork_and_offload(namespace: str, size: tuple[int, int]) -> tuple[str, str]:
    def own() -> None:
        offload(namespace, size, "child")
        assert forwards(4, "child")
        release("child")

    return in_fork(own)


def cycle(namespace: str, size: tuple[int, int], times: int) -> None:
    """Takes a model on meta from its first forward to inference, releases it and forgets it."""
    for _ in range(times):
        offload(namespace, size)
        assert forwards(5) and manager().iters_before_inference == 0
        release()
        forget()


def cycle_own(times: int) -> None:
    """The same with one model that has its own weights, and is offloaded again and again."""
    for _ in range(times):
        offload_again(None)
        assert forwards(5) and manager().iters_before_inference == 0
        release()


def keep_own(size: tuple[int, int]) -> None:
    _keep(resident(*size), resident(*size), DEFAULT)


def holds() -> dict[str, int]:
    """What this process holds: memory of its own, descriptors, threads, and mappings that are not the allocator's."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        "own_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files_mapped": sum(len(fields) == 6 and fields[5].startswith("/") for fields in mapped),
    }


def pss_bytes(namespace: str) -> int:
    """This process's share of the namespace's weights: proportional, so that shares of all processes add up."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if "-" in key.split(" ")[0]:
            inside = f"/dev/shm/ftd.{namespace}.g" in line
        elif inside and key == "Pss":
            total += int(rest.split()[0]) * 1024
    return total
