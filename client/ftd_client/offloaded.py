"""One offloaded model, between `offload()` and `release()`: opened, closed, and asked from outside of its forwards."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.plan.plan import Plan
from ftd.plan.profile import Identity, Profile
from ftd_client.forks import forget_after_fork
from ftd_client.memory_usage import GPUMemoryUsage
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.phase.course import Course, Phase
from ftd_client.phase.instrumentation import recorder
from ftd_client.phase.known import Known
from ftd_client.phase.model_profile import Static
from ftd_client.phase.planning import Measured
from ftd_client.phase.profile_keeper import ProfileKeeper
from ftd_client.phase.progress import Progress
from ftd_client.phase.replanning import Plans
from ftd_client.phase.structure import Structure
from ftd_client.phase.timings import Timings
from ftd_client.stream.hooks import is_offloaded
from ftd_client.stream.units import OffloadError

_log = logging.getLogger("ftd")


class Offloaded:
    """A model between `offload()` and `release()`.

    Args:
        costs: of copies, measured once and kept by the caller.
    """

    def __init__(self, model: nn.Module, config: OffloadConfig, device: torch.device, costs: CopyCosts) -> None:
        if is_offloaded(model):
            raise OffloadError(
                f"{type(model).__qualname__}, or a module of it, is offloaded already",
                "call release() of the manager that has it first",
            )
        self.model = model
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # taken before the lock, by whatever must not happen inside of a forward
        record = recorder(config)
        record(config=config, device=device)
        self.plans = Plans(model, config, device, self._lock, self._turn, self.update_state, record)
        try:
            staged = self.plans.staged
            record(units=staged.units, host=staged.host)
            self.skip_honored = config.skip_discovery and not staged.by_hand_only
            if config.skip_discovery and staged.by_hand_only:
                _log.warning(
                    "skip_discovery is not honoured: include_patterns %s select no module, so that discovery has to "
                    "take place",
                    list(config.include_patterns),
                )
            sources = [(staged.host.addresses[param.name], param.nbytes) for param in staged.parked]
            cost = costs.of(staged.link, staged.host.kind, staged.host.samples(sources))
            record(link={"link": staged.link, "device": device, "cost": cost})
            course = Course(config.discovery_iters, config.profiling_iters, skip_discovery=self.skip_honored)
            structure = Structure.static(staged.units)
            known = Known(structure, Measured.nothing(len(structure.order)), cost, Timings())
            self._keeper = ProfileKeeper(Static(model, staged.units), device, staged.source.namespace)
            if not staged.by_hand_only:
                known = self._keeper.seed(known, config)
            self.progress = Progress(
                model,
                self.plans,
                course,
                known,
                self._lock,
                self._keeper.keep,
                regions_only=staged.by_hand_only,
            )
            self.progress.begin()
            # what is resident is there when the model is given back
            staged.link.drain()
        except BaseException:
            self.close()
            raise
        forget_after_fork(self)

    # --- setting up and taking down -----------------------------------------------------------------------------

    def close(self, *, preserve_model: bool = True) -> None:
        """Puts the model back as it was before."""
        with self._turn, self._lock:
            self.plans.close(preserve_model=preserve_model)

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would never be free, nor its forward ever end."""
        ours = self._turn._is_owned() or self._lock._is_owned()  # type: ignore[attr-defined]
        if not ours:
            self._turn._at_fork_reinit()  # type: ignore[attr-defined]
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]
            if self.plans.running is not None:
                self.plans.running.installed.stream.abandon()

    def refuse_inside(self, what: str) -> None:
        """
        Raises:
            OffloadError: a forward of the model runs in this thread; of another thread it is waited for.
        """
        with self._turn, self._lock:
            if self.plans.running is not None:
                self.plans.running.refuse_inside(what)

    @property
    def config(self) -> OffloadConfig:
        return self.plans.config

    def configure(self, config: OffloadConfig) -> None:
        """Takes over what can change while a model is offloaded."""
        with self._lock:
            self.plans.config = config
            self.progress.configure(config)

    # --- phases -------------------------------------------------------------------------------------------------

    @property
    def course(self) -> Course:
        return self.progress.course

    def region(self, name: str) -> AbstractContextManager[None]:
        """A block marked by hand.

        Raises:
            OffloadError: discovery, which finds such blocks, is skipped.
        """
        if self.skip_honored:
            raise OffloadError(
                f"offload_block({name!r}): blocks marked by hand are found by discovery, which is skipped",
                "set skip_discovery=False",
            )
        return self.plans.running.region(name) if self.plans.running is not None else nullcontext()

    def update_state(self) -> Phase:
        """As `Progress.update_state`. Waits for a forward of another thread."""
        with self._turn:
            return self.progress.update_state()

    def pause(self, paused: bool) -> None:
        """Measures and counts no forward of profiling; the instruments stay."""
        self.progress.paused = paused

    def suspend(self, suspended: bool) -> None:
        """Takes the instruments of profiling out, or puts them back; the plan stays."""
        with self._turn, self._lock:
            if self.plans.suspended == suspended:
                return
            self.refuse_inside("suspend_profiling() or resume_profiling()")
            self.plans.suspended = suspended
            self.plans.hook(self.course.phase)

    def clear_timings(self) -> None:
        with self._lock:
            self.progress.clear_timings()

    def join(self) -> None:
        with self._lock:
            if self.plans.running is not None:
                self.plans.running.installed.stream.join()

    # --- profiles -----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """What a profile of this model is measured on."""
        return self._keeper.identity(self.config)

    def profile(self) -> Profile:
        """What was measured.

        Raises:
            OffloadError: nothing was yet.
        """
        known = self.progress.known
        if not known.measured.known:
            raise OffloadError(
                f"nothing is measured of {type(self.model).__qualname__} yet: it is in {self.course.phase}",
                f"run {self.course.left} more forwards first",
            )
        return self._keeper.profile(known, self.config)

    def restore(self, profile: Profile) -> None:
        """Goes to inference by a profile of this model.

        Raises:
            ProfileError, BudgetError: it does not fit after all; the model goes on as before.
            Exception: any, from putting its plan to work; likewise.
        """
        with self._turn, self._lock:
            self.refuse_inside("load_profile()")
            known, dropped = self._keeper.restore(profile, self.progress.known)
            self.progress.jump_to_inference(known, dropped)

    # --- facts --------------------------------------------------------------------------------------------------

    def memory_usage(self) -> GPUMemoryUsage:
        plan = self.plans.running.installed.plan if self.plans.running is not None else None
        ring_bytes, plan_bytes = (plan.ring_bytes, plan.gpu_bytes) if plan is not None else (0, 0)
        rest_bytes = self.plans.staged.rest.nbytes
        return GPUMemoryUsage(ring_bytes, rest_bytes, plan_bytes + rest_bytes)

    def streamed_units(self) -> list[str]:
        return [unit.name for block in self.plans.installed().streamed for unit in block]

    def resident_units(self) -> list[str]:
        return [unit.name for unit in self.plans.installed().resident]

    @property
    def plan(self) -> Plan:
        return self.plans.installed().plan
