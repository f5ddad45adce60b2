"""A model's plans, one after another: each is put to work in place of the one before, or that one is put back."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.plan.errors import BudgetError
from ftd.plan.plan import Plan
from ftd.plan.strategy import AllStreamed
from ftd_client.interrupts import uninterrupted
from ftd_client.phase.budget import budget_bytes
from ftd_client.phase.course import Phase
from ftd_client.phase.diagnostics import describe, log_plan
from ftd_client.phase.instrumentation import Recorder
from ftd_client.phase.known import Known
from ftd_client.phase.planning import choose_plan
from ftd_client.phase.running import Access, Running
from ftd_client.phase.structure import Structure
from ftd_client.stream.checked import CheckedStream
from ftd_client.stream.installed import Installed, resident_units
from ftd_client.stream.residents import Residents
from ftd_client.stream.runtime import Stream
from ftd_client.stream.staged import Staged
from ftd_client.stream.units import OffloadError, Param, Unit
from ftd_client.stream.waits import give_way

_log = logging.getLogger("ftd")


class Chosen(NamedTuple):
    """A plan, and what `Installed` is given with it.

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
    def of(plan: Plan, units: list[Unit | None], structure: Structure) -> Chosen:
        known = list(structure.units)
        return Chosen(plan, units, structure.unplanned, known, [list(unit.params) for unit in known])

    def still_holds(self, managed: Container[Param]) -> bool:
        """Whether each unit is of the parameters that it was of, all of them managed."""
        return all(
            unit.params == params and all(param in managed for param in params)
            for unit, params in zip(self.known, self.params, strict=True)
        )


class Plans:
    """A model taken apart, and one plan after the other at work in it, until `close`.

    Args:
        config: of the next plan.
        lock: of what is at work.
        turn: held by a forward of the whole model to its end.
        done: called after each forward that raised nothing.
        record: is told each problem and its plan.

    Attributes:
        running: None where no plan is at work.
        chosen: the last plan that was put to work.
        suspended: profiling's instruments stay out.
        residents: of the plan at work; between two plans those of the one before.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        device: torch.device,
        lock: threading.RLock,
        turn: threading.RLock,
        done: Callable[[], object],
        record: Recorder,
    ) -> None:
        self.config = config
        self.running: Running | None = None
        self.chosen: Chosen | None = None
        self.suspended = False
        self._model = model
        self._device = device
        self._lock = lock
        self._turn = turn
        self._done = done
        self._record = record
        self.staged = Staged(model, config, device, self._demand, self.in_ring)
        self.residents = Residents(self.staged.parked, self.staged.loader, self.staged.link.device)

    def close(self, *, preserve_model: bool) -> None:
        """Puts the model back as it was before."""
        with ExitStack() as stack:
            self._done = _nobody  # its owner holds us: weights are not to wait for the garbage collector
            stack.callback(self.staged.close, preserve_model=preserve_model)
            stack.callback(self.residents.close)
            self._stop()

    # --- choosing -----------------------------------------------------------------------------------------------

    def replan(self, known: Known, phase: Phase, dropped: Sequence[Param] = ()) -> None:
        """Chooses a plan for what is known now, and puts it to work in place of the one before.

        Args:
            dropped: parameters that turned out not to be managed.

        Raises:
            BudgetError: no plan fits; the one before is at work.
            OffloadError: the plan before, when it was taken out, found weights changed or replaced.
            Exception: any, from putting the plan to work; the one before is, or a smaller one, where there was one.
        """
        budget = self._budget(known, leaving=sum(param.nbytes for param in dropped))
        names = [unit.name for unit in known.structure.order]
        self._record(problem={"order": names, "measured": known.measured, "budget_bytes": budget})
        plan, units = self._choose(self.config, known, budget)
        if budget is None and plan.gpu_bytes > (free := self._budget(known, 1.0) or 0):
            # latency mode knows no limit but what there is
            plan, units = self._choose(self.config, known, free)
        self._record(plan=plan)
        with uninterrupted():
            self._exchange(Chosen.of(plan, units, known.structure), resident_units(plan, units), known, phase, dropped)

    def _exchange(
        self, chosen: Chosen, residents: Iterable[Unit], known: Known, phase: Phase, dropped: Sequence[Param]
    ) -> None:
        before, found = self.chosen, None
        try:
            try:
                self._stop()
            except OffloadError as error:  # everything is given back
                found = error
            # first, to make room for what is dropped
            self.residents.keep(param for unit in residents for param in unit.params)
            self.staged.drop(dropped)
            self._put_to_work(chosen, known, phase)
        except BaseException as error:
            with suppress(Exception):  # the first error tells more
                # an interrupt of what was to wait for it: memory that the frames hold is written to
                self.staged.link.drain()
            if before is not None:
                traceback.clear_frames(error.__traceback__)  # they hold memory of the plan that is not to be
                self._fall_back(before, known, phase, error)
            if found is None:
                raise
            raise found from error
        if found is not None:
            raise found

    def replan_after_forward(self, known: Known, phase: Phase, dropped: Sequence[Param] = ()) -> None:
        """As `replan`; but where a plan is at work after all, what kept the new one from it does not fail the forward
        that is done."""
        try:
            self.replan(known, phase, dropped)
        except BudgetError:
            self.hook(phase)  # as the phase now wants it
            raise
        except OffloadError:
            raise
        except Exception:
            if self.running is None:
                raise

    def still_fits(self, known: Known, installed: Installed) -> bool:
        """Whether a plan, made before the order was known, is of the same blocks and within the budget."""
        budget = self._budget(known)
        units = [unit for unit in known.structure.order if not unit.resident]
        planned = [unit for unit in installed.order if not unit.resident]
        streamed = {unit for block in installed.streamed for unit in block}
        return (
            units == planned
            and not known.structure.unplanned
            and not any(unit.resident for unit in streamed)
            and (budget is None or installed.plan.gpu_bytes <= budget)
        )

    def _choose(self, config: OffloadConfig, known: Known, budget: int | None) -> tuple[Plan, list[Unit | None]]:
        order = known.structure.order
        resident = {unit for unit in order if all(self.residents.tensor_of(param) is not None for param in unit.params)}
        streamed = set(order) - resident if self.running is not None else ()
        return choose_plan(config, order, known.measured, known.cost, budget, self.staged.slot_bytes, streamed)

    def _budget(self, known: Known, fraction: float | None = None, leaving: int = 0) -> int | None:
        """Bytes for a plan; `leaving` of what is managed will live on the device beside it."""
        ours = self.running.installed.plan.gpu_bytes if self.running is not None else 0
        budget = budget_bytes(
            fraction or self.config.max_gpu_mem_fraction,
            self._device,
            ours=ours,
            others=self.staged.rest.nbytes,
            allocated_before=self.running.activations.before_bytes if self.running is not None else None,
            activation_bytes=known.measured.activation_bytes,
        )
        return None if budget is None else max(0, budget - leaving)

    # --- putting to work ----------------------------------------------------------------------------------------

    def access(self, phase: Phase) -> Access:
        """How parameters reach compute in a phase."""
        mode = self.config.profile_mode
        return "view" if mode == "getter" and phase is not Phase.PROFILING else mode

    def hook(self, phase: Phase) -> None:
        """Hooks the plan at work, if there is one, as the phase wants it."""
        if self.running is not None:
            profiling = phase is Phase.PROFILING and not self.suspended
            self.running.hook(self.access(phase), frames=phase is Phase.DISCOVERY, times=profiling)

    def _put_to_work(self, chosen: Chosen, known: Known, phase: Phase) -> None:
        staged, plan = self.staged, chosen.plan
        installed = Installed(
            plan,
            chosen.units,
            chosen.unplanned,
            staged.parked,
            self.residents,
            staged.loader,
            staged.link,
            self._lock,
            ring=self.access(phase) == "view",
            runtime=CheckedStream if self.config.enable_diagnostics else Stream,
        )
        self.running = Running(
            self._model,
            installed,
            chosen.known,
            staged.loader,
            staged.link,
            self._lock,
            self._turn,
            staged.check,
            self._done,
        )
        try:
            self.hook(phase)
        except BaseException:
            self._stop()
            raise
        self.chosen = chosen
        staged.source.tell(self._device, staged.nbytes, plan.resident_bytes, plan.streamed_bytes, staged.host)
        _log.info("%s%s", describe(plan, phase), f"; they came by {self.residents.way}" if plan.resident else "")
        if self.config.enable_diagnostics:
            log_plan(plan, known.cost, known.timings)

    def _fall_back(self, before: Chosen, known: Known, phase: Phase, error: BaseException) -> None:
        """Puts the plan that was at work back, where its units are still what they were; else the smallest one."""
        try:
            if not before.still_holds(self.staged.parked):
                # a strategy of the user's own may not know how little is possible
                config, smallest_bytes = self.config.model_copy(update={"load_strategy": AllStreamed()}), 0
                try:
                    self._choose(config, known, 0)
                except BudgetError as short:
                    smallest_bytes = short.smallest_bytes
                before = Chosen.of(*self._choose(config, known, smallest_bytes), known.structure)
            self._put_to_work(before, known, phase)
        except Exception as another:
            _log.warning("no plan is at work: %s: %s", type(another).__name__, another)
            self.residents.close()
        else:
            _log.warning(
                "a plan could not be put to work (%s: %s); instead: %s",
                type(error).__name__,
                error,
                describe(before.plan, phase),
            )

    def _stop(self) -> None:
        """Takes the plan at work out, if there is one: what is resident stays, everything else managed is parked."""
        running, self.running = self.running, None
        if running is not None:
            try:
                running.close()
            finally:
                self.residents.review()

    # --- what others reach for ----------------------------------------------------------------------------------

    def installed(self) -> Installed:
        """
        Raises:
            OffloadError: no plan is at work.
        """
        if self.running is None:
            raise OffloadError(
                f"{type(self._model).__qualname__} has no plan at work: an error took it out", "call release()"
            )
        return self.running.installed

    def manages(self, params: Iterable[Param]) -> bool:
        """Whether all of them are managed still."""
        return all(param in self.staged.parked for param in params)

    def in_ring(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies where other weights will be soon."""
        running = self.running
        return running is not None and running.installed.ring.holds(tensor)

    def _demand(self, param: Param) -> torch.Tensor:
        """A parameter for somebody who reached for it where it is parked."""
        running = self.running
        if running is not None:
            give_way(running.installed.stream, param.name)
        with self._lock:
            if param not in self.staged.parked:
                return param.tensor  # released while this thread waited
            return self.running.demand(param) if self.running is not None else self.staged.loader.lend([param])[0]


def _nobody() -> None:
    """The model is given back."""
