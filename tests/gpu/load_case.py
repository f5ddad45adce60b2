"""A model whose every bit counts, and followers of it in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LAYERS = 24
SHAPE = (4096, 8192)  # 64 MiB of bfloat16


class Stack(nn.Module):
    """Linears in a row, the last of them tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SHAPE[1], SHAPE[0], bias=False) for _ in range(LAYERS))
        self.small = nn.ModuleList(nn.Linear(3 + number, 5) for number in range(40))
        self.scale = nn.Parameter(torch.empty(7))  # of another type
        self.head = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        self.head.weight = self.layers[0].weight


def on_meta() -> Stack:
    with torch.device("meta"):
        return Stack()


def checkpoint() -> dict[str, torch.Tensor]:
    """1.5 GiB of random bits, NaNs among them; one name of the tie, since parameters are said once."""
    torch.manual_seed(5)
    made = {}
    for name, parameter in on_meta().named_parameters():
        dtype = torch.float32 if name == "scale" else torch.bfloat16
        noise = torch.randint(-(2**31), 2**31 - 1, (parameter.numel(),), dtype=torch.int32)
        made[name] = noise.view(dtype)[: parameter.numel()].clone().view(parameter.shape)
    return made


def differing(model: nn.Module, views: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters that are not bit for bit what the views show."""
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter.detach().cpu().view(torch.int16), views[name].view(torch.int16))
    ]


def sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Of the bits of each: quick on a GPU, so that a process that loads in a loop does little else."""
    return {name: int(tensor.detach().view(torch.int16).sum(dtype=torch.int64)) for name, tensor in tensors}


def load_once(weights: Any, device: Any, expected: dict[str, int] | None = None) -> dict[str, Any]:
    """Loads a new model and says how it came, and what of it is wrong.

    Args:
        expected: `sums` to compare with, instead of every bit.
    """
    model = on_meta()
    report = weights.load(model, device)
    if expected is None:
        wrong = differing(model, weights.state_dict())
    else:
        wrong = [name for name, value in sums(model.named_parameters()).items() if value != expected[name]]
    if model.head.weight is not model.layers[0].weight:
        wrong.append("the tie")
    return {"way": report.way, "why": report.why, "wrong": wrong, "seconds": report.seconds}


_CHILD = """
import json, sys
import ftd_client, torch
from tests.gpu.load_case import load_once, sums
namespace, device, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.empty(1, device=device)
with ftd_client.attach(namespace) as weights:
    expected = sums(weights.state_dict().items())
    print("ready", flush=True)
    sys.stdin.readline()
    while times:
        lost = weights.lost
        times = 0 if lost else times - 1
        print(json.dumps(load_once(weights, device, expected if times else None) | {"lost": lost}), flush=True)
    # whatever happened, torch is none the wiser
    assert torch.empty(1, device=device).numel() == 1
    assert (torch.ones(1000, device=device) * 3).sum().item() == 3000
    torch.cuda.synchronize()
"""


class Loader:
    """A follower that loads again and again, until it has done so as often as told or its daemon is lost."""

    def __init__(self, namespace: str, device: str = "cuda:0", *, times: int = 1, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, namespace, device, str(times)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )

    def ready(self) -> None:
        """Attached, with a context."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """What the next load did."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return dict(json.loads(line))

    def rest(self) -> list[dict[str, Any]]:
        """What all others did; it ended well."""
        out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]


@contextmanager
def loaders(namespace: str, *devices: str, times: int = 1, **environ: str) -> Iterator[list[Loader]]:
    """Followers that are ready, and gone at the end."""
    made = [Loader(namespace, device, times=times, **environ) for device in devices]
    try:
        for each in made:
            each.ready()
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.communicate()
