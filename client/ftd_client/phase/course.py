"""The phases of an offloaded model, as counting: discovery → profiling → inference."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """`idle` is before `offload()` and after `release()`."""

    IDLE = "idle"
    DISCOVERY = "discovery"
    PROFILING = "profiling"
    INFERENCE = "inference"


class Course:
    """How far a model is. A phase ends after a forward, so each that is entered has at least one.

    Args:
        discovery_iters: forwards of discovery; 0 acts like 1.
        profiling_iters: likewise.
        skip_discovery: begin with profiling.
    """

    def __init__(self, discovery_iters: int, profiling_iters: int, *, skip_discovery: bool) -> None:
        self.phase = Phase.PROFILING if skip_discovery else Phase.DISCOVERY
        self.discovery_iters = discovery_iters
        self.profiling_iters = profiling_iters
        self._done = 0

    @property
    def left(self) -> int:
        """Forwards until inference, at least; those of a paused profiling don't count."""
        profiling = max(1, self.profiling_iters)
        if self.phase is Phase.DISCOVERY:
            return max(1, self.discovery_iters - self._done) + profiling
        return max(1, profiling - self._done) if self.phase is Phase.PROFILING else 0

    def forward_done(self) -> bool:
        """Counts a forward; True when its phase ends with it (`advance` is then due)."""
        self._done += 1
        wanted = self.discovery_iters if self.phase is Phase.DISCOVERY else self.profiling_iters
        return self.phase is not Phase.INFERENCE and self._done >= wanted

    def advance(self) -> Phase:
        self.phase = Phase.PROFILING if self.phase is Phase.DISCOVERY else Phase.INFERENCE
        self._done = 0
        return self.phase

    def jump_to_inference(self) -> None:
        """A restored profile takes the place of both phases."""
        self.phase, self._done = Phase.INFERENCE, 0

    def recount(self) -> None:
        """The measurements of this phase were dropped: its forwards count again from 0."""
        self._done = 0
