"""Followers of a benchmark, each function in a process of its own: through ftd's public interface only."""

from __future__ import annotations

import resource
import threading
import time

import torch
from torch import nn

import ftd_client
from ftd_client.strategy import AllStreamed
from tests.bench import digest
from tests.bench.child import Found, meet
from tests.bench.loaders import start_device, wait


def attach(namespace: str, device: str, times: int) -> Found:
    """Attaches and closes, again and again, with the device started."""
    start_device(device)
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        weights = ftd_client.attach(namespace)
        seconds.append(time.perf_counter() - begun)
        if len(seconds) < times:
            weights.close()
    begun = time.perf_counter()
    weights.state_dict()
    return {"first_s": seconds[0], "again_s": seconds[1:], "state_dict_s": time.perf_counter() - begun}


def crowd(namespace: str, count: int) -> Found:
    """So many attachments that begin at once in threads, held until told to end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    times: list[float] = []
    failed: list[Exception] = []
    held = []
    line = threading.Barrier(count + 1)

    def one() -> None:
        line.wait()
        begun = time.perf_counter()
        try:
            weights = ftd_client.attach(namespace, timeout=60)
        except Exception as error:
            failed.append(error)
            return
        times.append(time.perf_counter() - begun)
        held.append(weights)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    meet()
    line.wait()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    meet()
    for weights in held:
        weights.close()
    return {"times_s": times}


def load(namespace: str, device: str) -> Found:
    """The whole model, twice, into a device that is already started."""
    start_device(device)
    begun = time.perf_counter()
    weights = ftd_client.attach(namespace)
    found: Found = {"attach_s": time.perf_counter() - begun}
    for nth in ("first", "second"):
        model = skeleton(weights)
        found[nth] = _loaded(weights, model, device)
        del model  # torch keeps the memory
    weights.close()
    return found


def load_together(namespace: str, device: str) -> Found:
    """The same, once, when the others begin as well."""
    start_device(device)
    weights = ftd_client.attach(namespace)
    model = skeleton(weights)
    meet()
    found = _loaded(weights, model, device)
    weights.close()
    return found


def _loaded(weights: ftd_client.Follower, model: nn.Module, device: str) -> Found:
    """When it began and ended, by the clock that all processes share; how it came; what is there now."""
    begun = time.monotonic()
    report = weights.load(model, device)
    wait(device)
    ended = time.monotonic()
    found = {"begun": begun, "ended": ended, "seconds": ended - begun, "way": report.way, "why": report.why}
    return found | {"digest": digest.of(dict(model.named_parameters()))}


def hold(namespace: str, device: str) -> Found:
    """Every page mapped for the CPU, and all layers streamed, which pins them where there is a GPU, until told to
    end."""
    weights = ftd_client.attach(namespace)
    for tensor in weights.state_dict().values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    start_device(device)
    cuda = torch.device(device).type == "cuda"
    config = ftd_client.OffloadConfig(
        include_patterns=["model.layers.*"], shm_enabled=True, shm_namespace=namespace, pinned_memory=cuda,
        num_blocks=2, min_blocks=2, profiling_iters=3, load_strategy=AllStreamed(),
    )  # fmt: skip
    model = ftd_client.offload(skeleton(weights), config, device=device)
    x = torch.zeros(1, device=device)
    with torch.inference_mode():
        for _ in range(ftd_client.get_offload_manager().iters_before_inference + 1):
            model(x)
    wait(device)
    meet()
    ftd_client.release()
    weights.close()
    return {}


class Chain(nn.Module):
    """Runs what it is made of in turn, and reads its own parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        for parameter in self.parameters(recurse=False):
            x = x + parameter.reshape(-1)[0]
        return x


def skeleton(weights: ftd_client.Follower) -> nn.Module:
    """A model on meta with the parameters of the manifest, whatever class they were of."""
    with torch.device("meta"):
        model = Chain()
        for placed in weights.manifest.tensors:
            owner: nn.Module = model
            *path, leaf = placed.spec.name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, Chain())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(placed.spec.shape), requires_grad=False))
    return model
