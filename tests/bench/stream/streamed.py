"""ftd's own rows: through its public interface only, compared bit for bit with the resident model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import ftd_client
from ftd_client.strategy import AllStreamed
from tests.bench.child import Found
from tests.bench.stream import llama
from tests.bench.stream.contest import Contest

NAME = "bench"


def all_streamed(contest: Contest) -> Found:
    """Every layer from the daemon's shared memory, through two layers' worth of GPU memory."""
    config = _config(
        contest, shm_enabled=True, shm_namespace=contest.namespace, num_blocks=2, min_blocks=2,
        load_strategy=AllStreamed(),
    )  # fmt: skip
    return _measured(contest, llama.skeleton(contest.shape), config, contest.fewest, contest.tokens)


def own_tensors(contest: Contest) -> Found:
    """The same from the model's own tensors, which `offload()` pins first."""
    config = _config(contest, num_blocks=2, min_blocks=2, load_strategy=AllStreamed())
    return _measured(contest, contest.on_cpu(), config, contest.fewest, contest.tokens)


def memory_mode(contest: Contest) -> Found:
    """As much GPU memory for weights as FlexTensor took, planned for each of two counts."""
    rows = {}
    for count in (contest.fewest, contest.many):
        # the option bounds the peak of the process, activations included
        nbytes = contest.weight_bytes + (contest.activation_bytes or {}).get(str(count), 0)
        config = _config(
            contest, shm_enabled=True, shm_namespace=contest.namespace, max_gpu_mem_fraction=contest.fraction(nbytes)
        )  # fmt: skip
        rows[count] = _measured(contest, llama.skeleton(contest.shape), config, count, (count,))
    # by field, then by count, as the other contestants' rows are
    fields = dict.fromkeys(field for row in rows.values() for field in row)
    merged = {field: {count: row[field] for count, row in rows.items() if field in row} for field in fields}
    return merged | {field: {k: v for d in merged[field].values() for k, v in d.items()} for field in ("ms", "equal")}


def hooks(contest: Contest) -> Found:
    """What a block costs the host: a model of as many modules whose compute is nothing, streamed and resident."""
    x = llama.tokens_of(64, llama.THIN, contest.on)
    resident = llama.random(llama.THIN, contest.on)
    bare_us = llama.host_us(resident, x)
    config = _config(contest, num_blocks=2, min_blocks=2, load_strategy=AllStreamed())
    model = ftd_client.offload(llama.random(llama.THIN, torch.device("cpu")), config, NAME, device=contest.device)
    _until_inference(model, x)
    blocks = len(ftd_client.offload_units(NAME))
    streamed_us = llama.host_us(model, x)
    ftd_client.release(NAME)
    return {"blocks": blocks, "resident_us": bare_us, "streamed_us": streamed_us,
            "us_per_block": (streamed_us - bare_us) / blocks}  # fmt: skip


def _config(contest: Contest, **fields: Any) -> ftd_client.OffloadConfig:
    return ftd_client.OffloadConfig(
        include_patterns=["layers.*"], pinned_memory=contest.cuda, **fields
    )  # fmt: skip


def _measured(
    contest: Contest, model: nn.Module, config: ftd_client.OffloadConfig, profiled: int, counts: tuple[int, ...]
) -> Found:
    """One offload, from `offload()` to `release()`.

    Args:
        profiled: tokens of the forwards before inference.
        counts: of the forwards that are timed and compared.
    """
    _warm_kernels(contest, profiled)
    x = contest.x(profiled)
    before = contest.allocated()
    begun = time.perf_counter()
    model = ftd_client.offload(model, config, NAME, device=contest.device)
    offload_s = time.perf_counter() - begun
    forwards_s = _until_inference(model, x)
    until_inference_s = time.perf_counter() - begun
    usage = ftd_client.get_gpu_memory_usage(NAME)
    row: Found = {
        "offload_s": offload_s,
        "gpu_bytes": usage.total_bytes,
        "ring_bytes": usage.blocks_bytes,
        "allocated_bytes": contest.allocated() - before,
        "ms": {count: llama.timed(model, contest.x(count)) for count in counts},
    }
    # forwards of discovery and profiling would have been made anyway, at the pace of inference
    row["setup_s"] = until_inference_s - len(forwards_s) * row["ms"][profiled] / 1e3
    row["first_forward_ms"] = forwards_s[0] * 1e3
    row["predicted_ms"] = _predicted_ms()
    if config.shm_enabled:
        row["streamed_bytes"] = _streamed_bytes(contest.namespace)
    with torch.inference_mode():
        outputs = {count: model(contest.x(count)).cpu() for count in counts}
    ftd_client.release(NAME)
    del model
    resident = contest.resident()
    with torch.inference_mode():
        row["equal"] = {count: torch.equal(resident(contest.x(count)).cpu(), outputs[count]) for count in counts}
    return row


def _until_inference(model: nn.Module, x: torch.Tensor) -> list[float]:
    """Runs the forwards of discovery and profiling; gives the seconds of each."""
    times = []
    with torch.inference_mode():
        for _ in range(ftd_client.get_offload_manager(NAME).iters_before_inference):
            begun = time.perf_counter()
            model(x)
            llama.wait(x.device)
            times.append(time.perf_counter() - begun)
    return times


def _warm_kernels(contest: Contest, count: int) -> None:
    """The first forward is compared with a steady one, and is not to pay for the loading of libraries."""
    one = llama.Shape(**{**vars(contest.shape), "layers": 1})
    llama.timed(llama.random(one, contest.on), contest.x(count), forwards=1)
    if contest.cuda:
        torch.cuda.empty_cache()


def _predicted_ms() -> float:
    """What the plan at work predicts of a forward."""
    plan = ftd_client.get_offload_manager(NAME).plan
    assert plan is not None
    return plan.predicted.time_ns / 1e6


def _streamed_bytes(namespace: str) -> int:
    """Bytes that cross the link in one forward, as status shows them of this process; it says so by its heartbeat."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        shown = subprocess.run(
            [sys.executable, "-m", "ftd", "status", "-n", namespace, "--json"], capture_output=True, check=True
        )
        mine = [follower for follower in json.loads(shown.stdout)["followers"] if follower["pid"] == os.getpid()]
        if mine and mine[0]["streamed_bytes"]:
            return int(mine[0]["streamed_bytes"])
        time.sleep(0.1)
    raise TimeoutError("status shows no streamed bytes of this process")


CONTESTANTS = {
    "ftd_all_streamed": all_streamed,
    "ftd_memory": memory_mode,
    "ftd_own_tensors": own_tensors,
    "ftd_hooks": hooks,
}
