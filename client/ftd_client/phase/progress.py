"""A model's way through its phases: what each forward tells, and a plan for what is known then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.plan.errors import BudgetError
from ftd_client.phase.course import Course, Phase
from ftd_client.phase.known import Known
from ftd_client.phase.observe import Observer, merge_order
from ftd_client.phase.planning import Measured
from ftd_client.phase.replanning import Plans
from ftd_client.phase.running import Running
from ftd_client.phase.structure import Discovery, Structure, refuse_kept_views
from ftd_client.stream.managed import nothing_is_managed
from ftd_client.stream.units import Param, Unit
from ftd_client.wording import count

_log = logging.getLogger("ftd")


class Progress:
    """From `begin` on, what is known and how far the model is; another plan whenever forwards have told enough.

    Args:
        known: before any forward.
        lock: of what is at work.
        profiled: called when everything is measured, before there is a plan for it.
        regions_only: as `Discovery.structure` has it.

    Attributes:
        paused: forwards of profiling are neither measured nor counted.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Plans,
        course: Course,
        known: Known,
        lock: threading.RLock,
        profiled: Callable[[Known, OffloadConfig], None],
        *,
        regions_only: bool,
    ) -> None:
        self.course = course
        self.known = known
        self.paused = False
        self._model = model
        self._plans = plans
        self._lock = lock
        self._tell_profiled = profiled
        self._regions_only = regions_only
        self._discovery = Discovery(known.structure.units)
        self._visited: list[Unit] = []
        self._left: set[Unit] = set()  # reached in inference, and not to be had in a plan

    def begin(self) -> None:
        """Puts the first plan to work.

        Raises:
            As `Plans.replan`.
        """
        self._plans.replan(self.known, self.course.phase)

    def configure(self, config: OffloadConfig) -> None:
        """Takes over what counts forwards; what could not be planned may be now."""
        self._left.clear()
        self.course.discovery_iters = config.discovery_iters
        self.course.profiling_iters = config.profiling_iters

    def update_state(self) -> Phase:
        """A forward has ended: counts it, and goes on to the next phase when it was the last of this one. Nothing has
        ended where nothing was called since the last time."""
        with self._lock:
            running = self._plans.running
            if self.course.phase is Phase.INFERENCE:
                if running is not None:
                    running.kept.check()
                    self._adapt(running)
            elif running is not None and (observer := running.observer) is not None and observer.begun:
                refuse_kept_views(self._model, self._plans.in_ring)
                if self.course.phase is Phase.DISCOVERY:
                    self._discovered(running, observer)
                elif not self.paused:
                    self._profiled(running, observer)
                observer.clear()
            return self.course.phase

    def jump_to_inference(self, known: Known, dropped: Sequence[Param]) -> None:
        """Goes on by what was measured elsewhere.

        Args:
            dropped: parameters that turn out not to be managed.

        Raises:
            BudgetError: no plan fits; the model goes on as before.
            Exception: any, from putting the plan to work; likewise.
        """
        before = self.known, copy(self.course)
        self.known = known
        self.course.jump_to_inference()
        try:
            self._plans.replan(known, self.course.phase, dropped)
        except Exception:
            if self._plans.manages(dropped):
                self.known, self.course = before
                self._plans.hook(self.course.phase)
            raise

    def clear_timings(self) -> None:
        """Drops what was measured; profiling counts its forwards from 0 again."""
        self.known.timings.clear()
        if self.course.phase is Phase.PROFILING:
            self.course.recount()

    def _discovered(self, running: Running, observer: Observer) -> None:
        self._discovery.add(observer)
        if not self.course.forward_done():
            return
        plans, before = self._plans, self.known
        structure, dropped = self._discovery.structure(regions_only=self._regions_only)
        if not structure.units:
            raise nothing_is_managed(self._model, plans.config)
        access = plans.access(self.course.phase)
        phase = self.course.advance()
        measured = before.measured.reordered(before.structure.order, structure.order, running.activations.peak_bytes)
        self.known = replace(before, structure=structure, measured=measured)
        if access == plans.access(phase) and not dropped and plans.still_fits(self.known, running.installed):
            plans.hook(phase)
            return
        plans.replan_after_forward(self.known, phase, dropped)

    def _profiled(self, running: Running, observer: Observer) -> None:
        prefix_ns, spans = observer.times()
        timings = self.known.timings
        timings.add(prefix_ns, spans)
        self._visited = merge_order(self._visited, [visit.unit for visit in observer.visits])
        if not self.course.forward_done():
            return
        quality = timings.quality()
        report = _log.warning if quality.problems else _log.info
        report(
            "profiled %s, spread %.0f %%%s",
            count(quality.forwards, "forward"),
            quality.spread * 100,
            "".join(f"; {problem}" for problem in quality.problems),
        )
        before = self.known.structure
        order = merge_order(before.order, self._visited)
        measured = Measured(timings.prefix_ns(), tuple(timings.compute_ns(order)), running.activations.peak_bytes)
        self.known = replace(self.known, structure=Structure(before.units, order), measured=measured)
        phase = self.course.advance()
        self._tell_profiled(self.known, self._plans.config)
        self._plans.replan_after_forward(self.known, phase)

    def _adapt(self, running: Running) -> None:
        """Takes units that a forward reached for the first time into the plan."""
        installed = running.installed
        if not installed.stream.missed:
            return
        missed, installed.stream.missed = installed.stream.missed, {}
        planned = len(installed.plan.streamed)
        new = {i: before for i, before in missed.items() if i >= planned and installed.streamed[i][0] not in self._left}
        if not new:
            return
        units = [installed.streamed[index][0] for index in new]
        known, chosen = self.known, self._plans.chosen
        structure = Structure(known.structure.units, list(known.structure.order))
        for unit, before in zip(units, new.values(), strict=True):
            structure.insert(unit, installed.streamed[before][0] if before < planned else None)
        measured = known.measured.reordered(known.structure.order, structure.order, known.measured.activation_bytes)
        self.known = replace(known, structure=structure, measured=measured)
        try:
            self._plans.replan_after_forward(self.known, self.course.phase)
        except BudgetError as error:
            _log.warning("blocks that forwards reach now are not taken into the plan: %s", error.message)
        finally:
            if self._plans.chosen is chosen:
                # the forward is done, and right; what is new goes on being loaded on demand
                self.known = known
                self._left.update(units)
