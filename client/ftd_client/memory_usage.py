"""GPU memory that a manager takes for one model, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ftd.units import MIB


@dataclass(frozen=True, slots=True)
class GPUMemoryUsage:
    """GPU memory of an offloaded model in the inference phase. Figures in `_mb` are in units of 2**20 bytes.

    Attributes:
        blocks_bytes: what streamed weights pass through.
        unmapped_tensors_bytes: parameters and buffers that are not managed and so were moved to the GPU.
        total_bytes: everything that was allocated for the model, managed weights that are resident included.
    """

    blocks_bytes: int
    unmapped_tensors_bytes: int
    total_bytes: int

    @property
    def blocks_mb(self) -> float:
        return self.blocks_bytes / MIB

    @property
    def unmapped_tensors_mb(self) -> float:
        return self.unmapped_tensors_bytes / MIB

    @property
    def total_mb(self) -> float:
        return self.total_bytes / MIB
