"""What the figures of a run were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ftd import __version__
from ftd.shm.segment import huge_policy

PEERS = (
    "safetensors", "transformers", "accelerate", "diffusers", "fastsafetensors", "runai-model-streamer", "flextensor",
)  # fmt: skip


def facts() -> list[tuple[str, str]]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    rows = [
        ("processor", f"{cpu}, {len(os.sched_getaffinity(0))} cores"),
        ("memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB, /dev/shm huge={huge_policy()}"),
        ("kernel", platform.release().split("-")[0]),
        ("software", ", ".join([f"ftd {__version__}", f"Python {platform.python_version()}", *_versions()])),
    ]
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ) if _has("nvidia-smi") else None  # fmt: skip
    if gpu is not None and gpu.returncode == 0:
        rows.append(("GPU", "; ".join(gpu.stdout.strip().splitlines())))
    return rows


def _versions() -> Iterator[str]:
    """Of torch and of the peers that are installed."""
    for package in ("torch", *PEERS):
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def _has(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in os.environ.get("PATH", "").split(os.pathsep))
