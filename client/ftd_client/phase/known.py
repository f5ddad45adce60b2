"""What is known of a model: what its plans are made by, and its profiles of."""

from __future__ import annotations

from dataclasses import dataclass

from ftd.plan.cost import CopyCost
from ftd_client.phase.planning import Measured
from ftd_client.phase.structure import Structure
from ftd_client.phase.timings import Timings


@dataclass(frozen=True, slots=True)
class Known:
    """
    Attributes:
        measured: of the structure's order.
        cost: of copies.
        timings: of the forwards that were profiled here; it grows.
    """

    structure: Structure
    measured: Measured
    cost: CopyCost
    timings: Timings
