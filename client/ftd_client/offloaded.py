"""One offloaded model: its weights on the host, its plan at work on the device, and the phases that it goes through."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.errors import FtdError
from ftd.plan import store
from ftd.plan.errors import BudgetError
from ftd.plan.plan import Plan
from ftd.plan.profile import Identity, Profile
from ftd.plan.strategy import AllStreamed
from ftd.plan.strictjson import ProfileError
from ftd.units import format_bytes, format_seconds
from ftd_client.forks import forget_after_fork
from ftd_client.memory_usage import GPUMemoryUsage
from ftd_client.phase.budget import budget_bytes
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.phase.course import Course, Phase
from ftd_client.phase.diagnostics import log_plan
from ftd_client.phase.instrumentation import recorder
from ftd_client.phase.model_profile import Static
from ftd_client.phase.observe import Observer, merge_order
from ftd_client.phase.planning import Measured, choose_plan
from ftd_client.phase.running import Access, Running
from ftd_client.phase.structure import Discovery, Structure, refuse_kept_views
from ftd_client.phase.timings import Timings
from ftd_client.profile_exchange import fetch, offer
from ftd_client.stream.checked import CheckedStream
from ftd_client.stream.hooks import is_offloaded
from ftd_client.stream.installed import Installed
from ftd_client.stream.managed import nothing_is_managed
from ftd_client.stream.runtime import Stream
from ftd_client.stream.staged import Staged
from ftd_client.stream.units import OffloadError, Param, Unit
from ftd_client.stream.waits import give_way
from ftd_client.wording import count

_log = logging.getLogger("ftd")


class _AtWork(NamedTuple):
    """A plan, and what `Installed` was given with it.

    Attributes:
        known: all of the model's units.
        params: of each of `known`, when the plan was made: discovery moves parameters between units.
    """

    plan: Plan
    units: list[Unit | None]
    unplanned: list[Unit]
    known: list[Unit]
    params: list[list[Param]]

    @staticmethod
    def of(plan: Plan, units: list[Unit | None], structure: Structure) -> _AtWork:
        known = list(structure.units)
        return _AtWork(plan, units, structure.unplanned, known, [list(unit.params) for unit in known])

    def still_holds(self, managed: Container[Param]) -> bool:
        """Whether each unit is of the parameters that it was of, all of them managed."""
        return all(
            unit.params == params and all(param in managed for param in params)
            for unit, params in zip(self.known, self.params, strict=True)
        )


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
        self.config = config
        self.device = device
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # taken before the lock, by whatever must not happen inside of a forward
        self.running: Running | None = None
        self._at_work: _AtWork | None = None
        self._left: set[Unit] = set()  # reached in inference, and not to be had in a plan
        self._record = recorder(config)
        self._record(config=config, device=device)
        self.paused = self.suspended = False
        self.staged = staged = Staged(model, config, device, self._demand, self._in_ring)
        try:
            self._record(units=staged.units, host=staged.host)
            self.skip_honored = config.skip_discovery and not staged.by_hand_only
            if config.skip_discovery and staged.by_hand_only:
                _log.warning(
                    "skip_discovery is not honoured: include_patterns %s select no module, so that discovery has to "
                    "take place",
                    list(config.include_patterns),
                )
            sources = [(staged.host.addresses[param.name], param.nbytes) for param in staged.parked]
            self.cost = costs.of(staged.link, staged.host.kind, staged.host.samples(sources))
            self._record(link={"link": staged.link, "device": device, "cost": self.cost})
            self.course = Course(config.discovery_iters, config.profiling_iters, skip_discovery=self.skip_honored)
            self.static = Static(model, staged.units)
            self.structure = Structure.static(staged.units)
            self.measured = Measured.nothing(len(self.structure.order))
            self.timings = Timings()
            self._visited: list[Unit] = []
            self._discovery = Discovery(staged.units)
            self._seed()
            self._replan()
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
            try:
                self._stop()
            finally:
                self.staged.close(preserve_model=preserve_model)

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would never be free, nor its forward ever end."""
        ours = self._turn._is_owned() or self._lock._is_owned()  # type: ignore[attr-defined]
        if not ours:
            self._turn._at_fork_reinit()  # type: ignore[attr-defined]
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]
            if self.running is not None:
                self.running.installed.stream.abandon()

    def refuse_inside(self, what: str) -> None:
        """
        Raises:
            OffloadError: a forward of the model runs in this thread; of another thread it is waited for.
        """
        with self._turn, self._lock:
            if self.running is not None:
                self.running.refuse_inside(what)

    # --- plans --------------------------------------------------------------------------------------------------

    def _replan(self, dropped: Sequence[Param] = ()) -> None:
        """Chooses a plan for what is known now, and puts it to work in place of the one before.

        Args:
            dropped: parameters that turned out not to be managed.

        Raises:
            BudgetError: no plan fits; the one before is at work.
            OffloadError: the plan before, when it was taken out, found weights changed or replaced.
            Exception: any, from putting the plan to work; the one before is, or a smaller one, where there was one.
        """
        order = self.structure.order
        budget = self._budget(leaving=sum(param.nbytes for param in dropped))
        self._record(problem={"order": [u.name for u in order], "measured": self.measured, "budget_bytes": budget})
        plan, units = self._choose(self.config, budget)
        if budget is None and plan.gpu_bytes > (free := self._budget(1.0) or 0):
            # latency mode knows no limit but what there is
            plan, units = self._choose(self.config, free)
        self._record(plan=plan)
        before, found = self._at_work, None
        try:
            try:
                self._stop()
            except OffloadError as error:  # everything is given back
                found = error
            self.staged.drop(dropped)
            self._put_to_work(_AtWork.of(plan, units, self.structure))
        except BaseException as error:
            if before is not None:
                traceback.clear_frames(error.__traceback__)  # they hold memory of the plan that is not to be
                self._fall_back(before, error)
            if found is None:
                raise
            raise found from error
        if found is not None:
            raise found

    def _choose(self, config: OffloadConfig, budget: int | None) -> tuple[Plan, list[Unit | None]]:
        return choose_plan(config, self.structure.order, self.measured, self.cost, budget, self.staged.slot_bytes)

    def _put_to_work(self, chosen: _AtWork) -> None:
        staged, plan = self.staged, chosen.plan
        installed = Installed(
            plan,
            chosen.units,
            chosen.unplanned,
            staged.parked,
            staged.loader,
            staged.link,
            self._lock,
            ring=self._access() == "view",
            runtime=CheckedStream if self.config.enable_diagnostics else Stream,
        )
        self.running = Running(
            self.model,
            installed,
            chosen.known,
            staged.loader,
            staged.link,
            self._lock,
            self._turn,
            staged.check,
            self.update_state,
        )
        try:
            self._hook()
        except BaseException:
            self._stop()
            raise
        self._at_work = chosen
        staged.source.tell(self.device, staged.nbytes, plan.resident_bytes, plan.streamed_bytes, staged.host)
        _log.info("%s%s", describe(plan, self.course.phase), f"; they came by {installed.way}" if plan.resident else "")
        if self.config.enable_diagnostics:
            log_plan(plan, self.cost, self.timings)

    def _fall_back(self, before: _AtWork, error: BaseException) -> None:
        """Puts the plan that was at work back, where its units are still what they were; else the smallest one."""
        try:
            if not before.still_holds(self.staged.parked):
                # a strategy of the user's own may not know how little is possible
                config, smallest_bytes = self.config.model_copy(update={"load_strategy": AllStreamed()}), 0
                try:
                    self._choose(config, 0)
                except BudgetError as short:
                    smallest_bytes = short.smallest_bytes
                before = _AtWork.of(*self._choose(config, smallest_bytes), self.structure)
            self._put_to_work(before)
        except Exception as another:
            _log.warning("no plan is at work: %s: %s", type(another).__name__, another)
        else:
            _log.warning(
                "a plan could not be put to work (%s: %s); instead: %s",
                type(error).__name__,
                error,
                describe(before.plan, self.course.phase),
            )

    def _replan_after_forward(self, dropped: Sequence[Param] = ()) -> None:
        """As `_replan`; but where a plan is at work after all, what kept the new one from it does not fail the forward
        that is done."""
        try:
            self._replan(dropped)
        except BudgetError:
            if self.running is not None:
                self._hook()  # as the phase now wants it
            raise
        except OffloadError:
            raise
        except Exception:
            if self.running is None:
                raise

    def _budget(self, fraction: float | None = None, leaving: int = 0) -> int | None:
        """Bytes for a plan; `leaving` of what is managed will live on the device beside it."""
        ours = self.running.installed.plan.gpu_bytes if self.running is not None else 0
        budget = budget_bytes(
            fraction or self.config.max_gpu_mem_fraction,
            self.device,
            ours=ours,
            others=self.staged.rest.nbytes,
            allocated_before=self.running.activations.before_bytes if self.running is not None else None,
            activation_bytes=self.measured.activation_bytes,
        )
        return None if budget is None else max(0, budget - leaving)

    def _hook(self) -> None:
        assert self.running is not None
        phase = self.course.phase
        profiling = phase is Phase.PROFILING and not self.suspended
        self.running.hook(self._access(), frames=phase is Phase.DISCOVERY, times=profiling)

    def _stop(self) -> None:
        """Takes the plan at work out, if there is one: everything managed is parked then."""
        running, self.running = self.running, None
        if running is not None:
            running.close()

    def _access(self) -> Access:
        mode = self.config.profile_mode
        return "view" if mode == "getter" and self.course.phase is not Phase.PROFILING else mode

    def _demand(self, param: Param) -> torch.Tensor:
        """A parameter for somebody who reached for it where it is parked."""
        running = self.running
        if running is not None:
            give_way(running.installed.stream, param.name)
        with self._lock:
            if param not in self.staged.parked:
                return param.tensor  # released while this thread waited
            return self.running.demand(param) if self.running is not None else self.staged.loader.lend([param])[0]

    def _in_ring(self, tensor: torch.Tensor) -> bool:
        running = self.running
        return running is not None and running.installed.ring.holds(tensor)

    # --- phases -------------------------------------------------------------------------------------------------

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
        return self.running.region(name) if self.running is not None else nullcontext()

    def update_state(self) -> Phase:
        """A forward has ended: counts it, and goes on to the next phase when it was the last of this one. Nothing has
        ended where nothing was called since the last time."""
        with self._lock:
            running = self.running
            if self.course.phase is Phase.INFERENCE:
                if running is not None:
                    running.kept.check()
                self._adapt()
            elif running is not None and (observer := running.observer) is not None and observer.begun:
                refuse_kept_views(self.model, self._in_ring)
                if self.course.phase is Phase.DISCOVERY:
                    self._discovered(running, observer)
                elif not self.paused:
                    self._profiled(running, observer)
                observer.clear()
            return self.course.phase

    def _discovered(self, running: Running, observer: Observer) -> None:
        self._discovery.add(observer)
        if not self.course.forward_done():
            return
        structure, dropped = self._discovery.structure(regions_only=self.staged.by_hand_only)
        if not structure.units:
            raise nothing_is_managed(self.model, self.config)
        access = self._access()
        self.course.advance()
        before, self.structure = self.structure, structure
        self.measured = self.measured.reordered(before.order, structure.order, running.activations.peak_bytes)
        if access == self._access() and not dropped and self._still_fits(running.installed):
            self._hook()
            return
        self._replan_after_forward(dropped)

    def _still_fits(self, installed: Installed) -> bool:
        """Whether the plan at work, made before the order was known, is of the same blocks and within the budget."""
        budget = self._budget()
        units = [unit for unit in self.structure.order if not unit.resident]
        planned = [unit for unit in installed.order if not unit.resident]
        streamed = {unit for block in installed.streamed for unit in block}
        return (
            units == planned
            and not self.structure.unplanned
            and not any(unit.resident for unit in streamed)
            and (budget is None or installed.plan.gpu_bytes <= budget)
        )

    def _profiled(self, running: Running, observer: Observer) -> None:
        prefix_ns, spans = observer.times()
        self.timings.add(prefix_ns, spans)
        self._visited = merge_order(self._visited, [visit.unit for visit in observer.visits])
        if self.course.forward_done():
            quality = self.timings.quality()
            report = _log.warning if quality.problems else _log.info
            report(
                "profiled %s, spread %.0f %%%s",
                count(quality.forwards, "forward"),
                quality.spread * 100,
                "".join(f"; {problem}" for problem in quality.problems),
            )
            order = self.structure.order = merge_order(self.structure.order, self._visited)
            self.measured = Measured(
                self.timings.prefix_ns(), tuple(self.timings.compute_ns(order)), running.activations.peak_bytes
            )
            self.course.advance()
            self._keep_profile()
            self._replan_after_forward()

    def _adapt(self) -> None:
        """Takes units that a forward reached for the first time into the plan."""
        if self.running is None or not self.running.installed.stream.missed:
            return
        installed = self.running.installed
        missed, installed.stream.missed = installed.stream.missed, {}
        planned = len(installed.plan.streamed)
        new = {i: before for i, before in missed.items() if i >= planned and installed.streamed[i][0] not in self._left}
        if not new:
            return
        units = [installed.streamed[index][0] for index in new]
        known, order = self.measured, list(self.structure.order)
        for unit, before in zip(units, new.values(), strict=True):
            self.structure.insert(unit, installed.streamed[before][0] if before < planned else None)
        self.measured = known.reordered(order, self.structure.order, known.activation_bytes)
        at_work = self._at_work
        try:
            self._replan_after_forward()
        except BudgetError as error:
            _log.warning("blocks that forwards reach now are not taken into the plan: %s", error.message)
        finally:
            if self._at_work is at_work:
                # the forward is done, and right; what is new goes on being loaded on demand
                self.structure.order, self.measured = order, known
                self._left.update(units)

    # --- profiles -----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """What a profile of this model is measured on."""
        return self.static.identity(self.config, self.device)

    def profile(self) -> Profile:
        """What was measured.

        Raises:
            OffloadError: nothing was yet.
        """
        if not self.measured.known:
            raise OffloadError(
                f"nothing is measured of {type(self.model).__qualname__} yet: it is in {self.course.phase}",
                f"run {self.course.left} more forwards first",
            )
        return self.static.profile(self.identity, self.structure, self.measured, self.cost, self.timings.forwards)

    def restore(self, profile: Profile) -> None:
        """Goes to inference by a profile of this model.

        Raises:
            ProfileError, BudgetError: it does not fit after all; the model goes on as before.
            Exception: any, from putting its plan to work; likewise.
        """
        with self._lock:
            self.refuse_inside("load_profile()")
            restored = self.static.restore(profile)
            before = self.structure, self.measured, self.cost, copy(self.course)
            self.structure, self.measured, self.cost = restored.structure, restored.measured, profile.copy
            self.course.jump_to_inference()
            try:
                self._replan(restored.dropped)
            except Exception:
                if all(param in self.staged.parked for param in restored.dropped):
                    self.structure, self.measured, self.cost, self.course = before
                    if self.running is not None:
                        self._hook()
                raise

    def _seed(self) -> None:
        """Plans the first forwards by what another worker measured, where the daemon knows it; the phases stay."""
        namespace = self.staged.source.namespace
        found = fetch(namespace, self.identity) if namespace and not self.staged.by_hand_only else None
        if found is None:
            return
        with contextlib.suppress(ProfileError):
            restored = self.static.restore(found)
            if not restored.dropped:
                # its activations were of that worker's inputs
                self.measured = replace(restored.measured, activation_bytes=None)
                self.structure = restored.structure
                self._discovery = Discovery(restored.structure.units)
                _log.info("the first plan is from a profile that the daemon keeps")

    def _keep_profile(self) -> None:
        """Keeps what was just measured where the configuration and the namespace say."""
        if not self.measured.known:
            return
        namespace, config = self.staged.source.namespace, self.config
        try:
            profile = self.profile()
        except ProfileError as error:  # names that a profile can't tell apart: nothing to stop a forward for
            _log.warning("what was measured makes no profile: %s", error.message)
            return
        if namespace:
            # in a thread: a hung daemon must not hold up a forward, whose lock is held here
            threading.Thread(target=offer, args=(namespace, profile), name="ftd-profile", daemon=True).start()
        if config.profile_storage_dir and not config.profile_read_only:
            try:
                store.save(Path(config.profile_storage_dir), profile)
            except FtdError as error:
                _log.warning("the profile is not stored: %s", error.message)

    # --- facts --------------------------------------------------------------------------------------------------

    def configure(self, config: OffloadConfig) -> None:
        """Takes over what can change while a model is offloaded."""
        with self._lock:
            self.config = config
            self._left.clear()
            self.course.discovery_iters = config.discovery_iters
            self.course.profiling_iters = config.profiling_iters

    def suspend(self, suspended: bool) -> None:
        """Takes the instruments of profiling out, or puts them back; the plan stays."""
        with self._lock:
            if self.suspended == suspended:
                return
            self.refuse_inside("suspend_profiling() or resume_profiling()")
            self.suspended = suspended
            if self.running is not None:
                self._hook()

    def clear_timings(self) -> None:
        with self._lock:
            self.timings.clear()
            if self.course.phase is Phase.PROFILING:
                self.course.recount()

    def join(self) -> None:
        with self._lock:
            if self.running is not None:
                self.running.installed.stream.join()

    def memory_usage(self) -> GPUMemoryUsage:
        plan = self.running.installed.plan if self.running is not None else None
        ring_bytes, plan_bytes = (plan.ring_bytes, plan.gpu_bytes) if plan is not None else (0, 0)
        rest_bytes = self.staged.rest.nbytes
        return GPUMemoryUsage(ring_bytes, rest_bytes, plan_bytes + rest_bytes)

    def streamed_units(self) -> list[str]:
        return [unit.name for block in self._installed().streamed for unit in block]

    def resident_units(self) -> list[str]:
        return [unit.name for unit in self._installed().resident]

    @property
    def plan(self) -> Plan:
        return self._installed().plan

    def _installed(self) -> Installed:
        if self.running is None:
            raise OffloadError(
                f"{type(self.model).__qualname__} has no plan at work: an error took it out", "call release()"
            )
        return self.running.installed


def describe(plan: Plan, phase: Phase) -> str:
    return (
        f"{phase}: {count(len(plan.streamed), 'block')} of {format_bytes(plan.streamed_bytes)} stream through "
        f"{format_bytes(plan.ring_bytes)}, {format_bytes(plan.resident_bytes)} are resident; a forward is predicted to "
        f"take {format_seconds(plan.predicted.time_ns / 1e9)} (strategy {plan.strategy})"
    )
