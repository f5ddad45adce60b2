"""The link that leads to a device."""

from __future__ import annotations

import torch

from ftd.cuda.runtime import load_runtime
from ftd.errors import UsageError
from ftd_client.stream.cpu_link import CpuLink
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.link import Link, LinkError, Reach


def open_link(device: torch.device, reach: Reach | None = None) -> Link:
    """A link to that device.

    Args:
        reach: what of the host's memory needs no slots on its way to a GPU; None for all that copies come from.

    Raises:
        UsageError: no link leads there.
        LinkError: CUDA cannot be used in this process.
        CudaError: CUDA refused a stream.
    """
    if device.type == "cpu":
        return CpuLink()
    if device.type != "cuda":
        raise UsageError(f"no link leads to {device}: expected a CUDA device or cpu", "set gpu_device, or device='cpu'")
    cuda, reason = load_runtime()
    if cuda is None:
        raise LinkError(f"no link leads to {device}: {reason}", "offload(..., device='cpu') runs without a GPU")
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return CudaLink(torch.device("cuda", ordinal), cuda, reach)
