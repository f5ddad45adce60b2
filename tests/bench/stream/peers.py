"""What users would pick instead of ftd, through the interfaces that those projects document."""

from __future__ import annotations

import gc
import time
from importlib.util import find_spec

import torch

from tests.bench.child import Found, Skip
from tests.bench.limits import link_bytes_per_s
from tests.bench.stream.contest import Contest
from tests.bench.stream.llama import layer_bytes, timed


def _needs(package: str) -> None:
    if find_spec(package) is None:
        raise Skip(f"{package} is not installed")


def resident(contest: Contest) -> Found:
    """All weights on the device: nothing is faster, and the roofline of streaming follows from it."""
    link = link_bytes_per_s(contest.on)
    model = contest.resident()
    streamed, held = layer_bytes(model), sum(p.nbytes for p in model.parameters())
    row: Found = {
        "link_bytes_per_s": link,
        "layer_bytes": streamed,
        "ms": {},
        "roofline_ms": {},
        "activation_bytes": {},
    }
    for count in contest.tokens:
        if contest.cuda:
            torch.cuda.reset_peak_memory_stats(contest.on)
        row["ms"][count] = timed(model, contest.x(count))
        row["roofline_ms"][count] = max(row["ms"][count], streamed / link * 1e3)
        row["activation_bytes"][count] = max(contest.peak() - held, 0)
    return row


def accelerate(contest: Contest) -> Found:
    """`cpu_offload`: each module's weights move when it is called."""
    _needs("accelerate")
    from accelerate import cpu_offload

    model = cpu_offload(contest.on_cpu(), contest.on, offload_buffers=True)
    # a second a forward, and steady
    ms = {count: timed(model, contest.x(count), forwards=3, warm=1) for count in contest.tokens}
    return {"ms": ms, "peak_bytes": contest.peak()}


def diffusers(contest: Contest) -> Found:
    """Group offloading, a layer a group, with a stream where there is one."""
    _needs("diffusers")
    _needs("accelerate")  # whose functions group offloading calls, without asking for it
    from diffusers.hooks import apply_group_offloading

    model = contest.on_cpu()
    begun = time.perf_counter()
    apply_group_offloading(
        model,
        onload_device=contest.on,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=contest.cuda,
        record_stream=contest.cuda,
        non_blocking=True,
    )
    setup_s = time.perf_counter() - begun
    ms = {count: timed(model, contest.x(count)) for count in contest.tokens}
    return {"ms": ms, "setup_s": setup_s, "peak_bytes": contest.peak()}


def flextensor_latency(contest: Contest) -> Found:
    """FlexTensor in latency mode, profiled for many tokens."""
    return _flextensor(contest, None, (contest.many,))


def flextensor_memory(contest: Contest) -> Found:
    """FlexTensor in memory mode, profiled for each of two counts."""
    return _flextensor(contest, contest.fraction(contest.budget_bytes), (contest.fewest, contest.many))


def _flextensor(contest: Contest, fraction: float | None, counts: tuple[int, ...]) -> Found:
    _needs("flextensor")
    if not contest.cuda:
        raise Skip("flextensor needs a CUDA device")
    import flextensor

    row: Found = {"ms": {}, "setup_s": {}, "gpu_bytes": {}}
    for count in counts:
        manager = flextensor.get_offload_manager(f"tokens{count}")
        config = flextensor.OffloadConfig(
            include_patterns=["layers.*"], profiling_iters=5, max_gpu_mem_fraction=fraction
        )  # fmt: skip
        model, x = contest.on_cpu(), contest.x(count)
        begun = time.perf_counter()
        model = manager.offload(model, config=config)
        if hasattr(model, "norm"):  # outside of what the patterns select
            model.norm.to(contest.on)
        with torch.inference_mode():
            for _ in range(manager.iters_before_inference):
                model(x)
        torch.cuda.synchronize()
        row["setup_s"][count] = time.perf_counter() - begun
        row["gpu_bytes"][count] = manager.get_gpu_memory_usage().total_bytes
        row["ms"][count] = timed(model, x)
        manager.release()
        del model, x
        gc.collect()
        torch.cuda.empty_cache()
    return row


CONTESTANTS = {
    "resident": resident,
    "accelerate": accelerate,
    "diffusers": diffusers,
    "flextensor_latency": flextensor_latency,
    "flextensor_memory": flextensor_memory,
}
