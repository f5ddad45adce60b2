"""One offloaded model: its weights on the host, its plan at work on the device, and the phases that it goes through."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.config.selection import ModuleName, Selection, class_names, select
from ftd.config.unmatched import nothing_managed
from ftd.errors import FtdError
from ftd.plan import store
from ftd.plan.plan import Plan
from ftd.plan.profile import Identity, Profile
from ftd.plan.strictjson import ProfileError
from ftd.units import format_bytes, format_seconds
from ftd_client.memory_usage import GPUMemoryUsage
from ftd_client.phase.budget import Activations, budget_bytes
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.phase.clock import clock_of
from ftd_client.phase.course import Course, Phase
from ftd_client.phase.diagnostics import log_plan
from ftd_client.phase.instrumentation import recorder
from ftd_client.phase.observe import Observer
from ftd_client.phase.planning import Measured, choose_plan
from ftd_client.phase.profiles import identity, make_profile, restore
from ftd_client.phase.structure import Discovery, Structure, refuse_kept_views
from ftd_client.phase.timings import Timings
from ftd_client.profiles import fetch, offer
from ftd_client.stream.checked import CheckedStream
from ftd_client.stream.hooks import Forward, Hooks, framed, is_offloaded, rooted, streamed, watched
from ftd_client.stream.installed import Installed, Loader, put_all
from ftd_client.stream.link import open_link
from ftd_client.stream.loose import Loose
from ftd_client.stream.parked import Parked
from ftd_client.stream.rest import Rest
from ftd_client.stream.runtime import Stream
from ftd_client.stream.source import OwnSource, SharedSource, Source
from ftd_client.stream.units import OffloadError, Param, Unit, make_units, reads_below
from ftd_client.walk import Parts, walk
from ftd_client.wording import count

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
        self.config = config
        self.device = device
        self._costs = costs
        self._lock = threading.RLock()
        self._undo = ExitStack()
        self._work = ExitStack()  # what belongs to the plan at work
        self._record = recorder(config)
        self._record(config=config, device=device)
        self.paused = self.suspended = False
        self.skip_honored = config.skip_discovery
        try:
            self._open()
        except BaseException:
            self._undo.close()
            raise

    # --- setting up and taking down -----------------------------------------------------------------------------

    def _open(self) -> None:
        config, model = self.config, self.model
        source: type[SharedSource] | type[OwnSource] = SharedSource if config.shm_enabled else OwnSource
        self.source: Source = source(model, config)
        self._undo.callback(self.source.close)
        parts = walk(model)
        selection = _select(model, parts, config)
        self._by_hand_only = not selection.managed
        if self._by_hand_only:
            self.skip_honored = False
            if config.skip_discovery:
                _log.warning(
                    "skip_discovery is not honoured: include_patterns %s select no module, so that discovery has to "
                    "take place",
                    list(config.include_patterns),
                )
            managed = {name: "" for group in parts.parameters for name in group.names}
        else:
            managed = dict(selection.managed)
        units, rest = make_units(model, parts, managed, ties=config.transfer_mode == "strategy")
        if config.profile_mode == "torch_function":
            for unit in units:
                if unit.scope is not None and unit.scope._modules and reads_below(unit.scope):
                    unit.resident = f"{type(unit.scope).__qualname__} computes in another way with stand-ins"
        self._record(units=units)
        self.structure = Structure.static(units)
        self._params = [param for unit in units for param in unit.params]
        self.rest = Rest(self.device, keep=self.source.shared)
        self._undo.callback(self.rest.restore)
        self.rest.take(rest, (*parts.buffers, *parts.transient))
        self.host = self.source.host([unit.params for unit in units], self.device)
        self._undo.callback(self.host.close)
        for warning in self.host.warnings:
            _log.warning("%s", warning)
        self.link = open_link(self.device)
        self._undo.callback(self.link.close)
        self._loader = Loader(self.host, self.link, config.transfer_mode)
        self._parked = {
            param: Parked.of(param.name, param.tensor, self.device, partial(self._demand, param), partial(_host, param))
            for param in self._params
        }
        self._undo.callback(lambda: put_all(self._parked, lambda param: param.tensor))
        put_all(self._parked, self._parked.__getitem__)
        self._undo.callback(self._work.close)
        guard = Hooks()
        guard.guard(model)
        self._undo.callback(guard.close)
        self.cost = self._costs.of(
            self.link, self.host.kind, [(self.host.addresses[p.name], p.nbytes) for p in self._params]
        )
        self._record(host=self.host, link={"link": self.link, "device": self.link.device, "cost": self.cost})
        self.course = Course(config.discovery_iters, config.profiling_iters, skip_discovery=self.skip_honored)
        self.measured = Measured.nothing(len(self.structure.order))
        self.timings = Timings()
        self._activations = Activations(self.device)
        self._discovery = Discovery(units)
        self._regions: dict[str, tuple[int, bool]] = {}
        self._static = [replace(unit, params=list(unit.params)) for unit in units]
        self._layers = {param.name: unit.layer for unit in units for param in unit.params}
        self._seed()
        self._replan()

    def close(self, *, preserve_model: bool) -> None:
        """Puts the model back as it was before."""
        with self._lock:
            self._undo.close()
            if not preserve_model:
                with torch.inference_mode(False):
                    put_all(self._params, lambda param: _emptied(param.tensor))

    # --- plans --------------------------------------------------------------------------------------------------

    def _replan(self) -> None:
        """Chooses a plan for what is known now, and puts it to work in place of the one before."""
        # kept until here, since it tells how much of what is allocated is ours
        ours = self._held_bytes()
        order = self.structure.order
        budget = budget_bytes(
            self.config.max_gpu_mem_fraction,
            self.device,
            ours=ours,
            others=self.rest.nbytes,
            activation_bytes=self.measured.activation_bytes,
        )
        self._record(problem={"order": [u.name for u in order], "measured": self.measured, "budget_bytes": budget})
        plan, units = choose_plan(self.config, order, self.measured, self.cost, budget, self._slot_bytes)
        self._record(plan=plan)
        self.budget_bytes = budget
        self._work.close()
        self._install(plan, units)
        self.source.tell(
            self.device, sum(p.nbytes for p in self._params), plan.resident_bytes, plan.streamed_bytes, self.host
        )
        _log.info("%s", describe(plan, self.course.phase))
        if self.config.enable_diagnostics:
            log_plan(plan, self.cost, self.timings)

    def _held_bytes(self) -> int:
        installed = getattr(self, "installed", None)
        return installed.plan.gpu_bytes if installed is not None else 0

    def _slot_bytes(self, unit: Unit) -> int:
        return self._loader.layout(unit.params).nbytes

    def _install(self, plan: Plan, units: Sequence[Unit | None]) -> None:
        self.installed: Installed | None = None
        loose = self._access_driven()
        installed = Installed(
            plan,
            units,
            self.structure.unplanned,
            self._parked,
            self._loader,
            self.link,
            self._lock,
            ring=not loose,
            runtime=CheckedStream if self.config.enable_diagnostics else Stream,
        )
        self._work.callback(self._uninstall, installed)
        self.installed = installed
        hooks = Hooks()
        self._work.callback(hooks.close)
        self._observer: Observer | None = None
        if self.course.phase is not Phase.INFERENCE and not self.suspended:
            profiling = self.course.phase is Phase.PROFILING
            self._observer = Observer(clock_of(self.device) if profiling else None)
        self._loose: Loose | None = None
        if loose:
            blocks = [[param for unit in block for param in unit.params] for block in installed.streamed]
            self._loose = Loose(self._lock, blocks, plan.ring_bytes, self.link, self._loader.submit)
            self._work.callback(self._loose.close)
            if self.config.profile_mode == "getter":
                hooks.getters(unit.scope for block in installed.streamed for unit in block)
        self._owner = {param: unit for unit in self.structure.units for param in unit.params}
        self._hook(hooks, installed)

    def _uninstall(self, installed: Installed) -> None:
        self.installed = None
        installed.close()

    def _access_driven(self) -> bool:
        mode = self.config.profile_mode
        return mode == "torch_function" or (mode == "getter" and self.course.phase is Phase.PROFILING)

    def _hook(self, hooks: Hooks, installed: Installed) -> None:
        stream, observer = installed.stream, self._observer
        self._regions = {}
        scopes: set[nn.Module] = set()
        if self._loose is None:
            for index, block in enumerate(installed.streamed):
                for unit in block:
                    last = unit is block[-1]
                    if unit.scope is None:
                        self._regions[unit.name] = (index, last)
                        continue
                    scopes.add(unit.scope)
                    if observer is None:
                        hooks.patch(unit.scope, partial(streamed, stream, index, last))
                    else:
                        hooks.patch(unit.scope, partial(watched, stream, index, last, unit, observer))
        if observer is not None:
            for unit in installed.resident:
                if unit.scope is not None and unit.scope not in scopes:
                    scopes.add(unit.scope)
                    hooks.patch(unit.scope, partial(watched, stream, -1, False, unit, observer))
            if self.course.phase is Phase.DISCOVERY:
                for path, module in self.model.named_modules():
                    if module not in scopes and module is not self.model and callable(getattr(module, "forward", None)):
                        hooks.patch(module, partial(framed, self._lock, observer, path, module))
        hooks.patch(self.model, self._root)

    def _root(self, forward: Forward) -> Forward:
        return rooted(self._lock, self._begin, self._end, self._done, forward)

    def _begin(self) -> None:
        assert self.installed is not None
        self.installed.stream.begin()
        if self._observer is not None:
            self._activations.begin()
            self._observer.begin()

    def _end(self) -> None:
        if self.installed is not None:
            self.installed.stream.end()
        if self._observer is not None:
            self._observer.finish()
            self._activations.finish()

    def _done(self) -> None:
        """After a forward of the whole model that raised nothing."""
        self.update_state()

    def _demand(self, param: Param) -> torch.Tensor:
        """A parameter for somebody who reached for it where it is parked."""
        with self._lock:
            installed, observer = self.installed, self._observer
            if self._loose is not None:
                unit = self._owner[param]
                wait = partial(self._loose.prepare, param)
                if observer is not None and not (observer.visits and observer.visits[-1].unit is unit):
                    observer.reach(unit, wait)
                tensor = self._loose.fetch(param)
                if tensor is not None:
                    return tensor
            elif observer is not None:
                observer.read(param)
            held = installed.tensor_of(param) if installed is not None else None
            return held if held is not None else self._loader.load([param])[0]

    # --- phases -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """A block marked by hand: what is read inside of it belongs together."""
        if self.skip_honored and not self._by_hand_only:
            raise OffloadError(
                f"offload_block({name!r}): blocks marked by hand are found by discovery, which is skipped",
                "set skip_discovery=False",
            )
        with self._lock:
            installed, observer = self.installed, self._observer
            step = self._regions.get(name)
            if step is not None and installed is not None:
                installed.stream.enter(step[0])
            if observer is not None:
                observer.push(name, None)
            try:
                yield
            finally:
                if observer is not None:
                    observer.pop()
                if step is not None and installed is not None:
                    installed.stream.leave(*step)

    def update_state(self) -> Phase:
        """A forward has ended: counts it, and goes on to the next phase when it was the last of this one."""
        with self._lock:
            phase = self.course.phase
            if phase is Phase.INFERENCE:
                self._adapt()
            elif phase is Phase.DISCOVERY:
                self._discovered()
            elif not (self.paused or self.suspended):
                self._profiled()
            return self.course.phase

    def _discovered(self) -> None:
        observer = self._observer
        if observer is None or self.installed is None:
            return
        ring = self.installed.ring
        refuse_kept_views(self.model, {"the ring": (ring.address, ring.address + ring.nbytes)})
        self._discovery.add(observer)
        if not self.course.forward_done():
            return
        structure, dropped = self._discovery.structure(regions_only=self._by_hand_only)
        if not structure.units:
            raise self.nothing_managed()
        self.course.advance()
        before, self.structure = self.structure.order, structure
        self._work.close()
        self._drop(dropped)
        self.measured = self.measured.reordered(before, structure.order, self._activations.peak_bytes)
        self._replan()

    def _drop(self, params: Sequence[Param]) -> None:
        """Parameters that turned out not to be managed live on the device from now on."""
        if params:
            put_all(params, lambda param: param.tensor)
            self.rest.take([param.group for param in params])
            gone = set(params)
            self._params = [param for param in self._params if param not in gone]
            self._parked = {param: parked for param, parked in self._parked.items() if param not in gone}

    def _profiled(self) -> None:
        observer = self._observer
        if observer is None:
            return
        prefix_ns, spans = observer.times()
        self.timings.add(prefix_ns, spans)
        if self.course.forward_done():
            quality = self.timings.quality()
            report = _log.warning if quality.problems else _log.info
            report(
                "profiled %s, spread %.0f %%%s",
                count(quality.forwards, "forward"),
                quality.spread * 100,
                "".join(f"; {problem}" for problem in quality.problems),
            )
            order = self.structure.order
            self.measured = Measured(
                self.timings.prefix_ns(), tuple(self.timings.compute_ns(order)), self._activations.peak_bytes
            )
            self.course.advance()
            self._keep_profile()
            self._replan()

    def _adapt(self) -> None:
        """Takes units that a forward reached for the first time into the plan."""
        if self.installed is None or not self.installed.stream.missed:
            return
        missed, self.installed.stream.missed = self.installed.stream.missed, []
        planned = len(self.installed.plan.streamed)
        new = {index: before for index, before in reversed(missed) if index >= planned}
        if not new:
            return
        for index, before in new.items():
            follower = self.installed.streamed[before][0] if before < planned else None
            self.structure.insert(self.installed.streamed[index][0], follower)
        known = self.measured
        self.measured = Measured(known.prefix_ns, _respread(self.timings, self.structure.order), known.activation_bytes)
        self._replan()

    # --- profiles -----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """What a profile of this model is measured on."""
        return identity([param for unit in self._static for param in unit.params], self.config, self.device)

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
        return make_profile(
            self.identity, self._static, self.structure, self.measured, self.cost, self.timings.forwards
        )

    def restore(self, profile: Profile) -> None:
        """Goes to inference by a profile of this model.

        Raises:
            ProfileError: it does not fit after all; the model goes on as before.
        """
        with self._lock:
            restored = restore(profile, self.model, self._static, self._layers)
            self._work.close()
            self._drop(restored.dropped)
            self.structure, self.measured, self.cost = restored.structure, restored.measured, profile.copy
            self.course.jump_to_inference()
            self._replan()

    def _seed(self) -> None:
        """Plans the first forwards by what another worker measured, where the daemon knows it; the phases stay."""
        if not isinstance(self.source, SharedSource) or self._by_hand_only:
            return
        found = fetch(self.source.namespace, self.identity)
        if found is None:
            return
        with contextlib.suppress(ProfileError):
            restored = restore(found, self.model, self._static, self._layers)
            if not restored.dropped:
                self.structure, self.measured = restored.structure, restored.measured
                self._discovery = Discovery(restored.structure.units)
                _log.info("the first plan is from a profile that the daemon keeps")

    def _keep_profile(self) -> None:
        """Keeps what was just measured where the configuration and the namespace say."""
        if not self.measured.known:
            return
        profile = self.profile()
        if isinstance(self.source, SharedSource):
            offer(self.source.namespace, profile)
        if self.config.profile_storage_dir and not self.config.profile_read_only:
            try:
                store.save(Path(self.config.profile_storage_dir), profile)
            except FtdError as error:
                _log.warning("the profile is not stored: %s", error.message)

    # --- facts --------------------------------------------------------------------------------------------------

    def configure(self, config: OffloadConfig) -> None:
        """Takes over what can change while a model is offloaded."""
        with self._lock:
            self.config = config
            self.course.discovery_iters = config.discovery_iters
            self.course.profiling_iters = config.profiling_iters

    def suspend(self, suspended: bool) -> None:
        """Takes the instruments of profiling out, or puts them back; the plan stays."""
        with self._lock:
            if self.suspended == suspended:
                return
            self.suspended = suspended
            if self.course.phase is Phase.PROFILING:
                self._replan()

    def clear_timings(self) -> None:
        with self._lock:
            self.timings.clear()
            if self.course.phase is Phase.PROFILING:
                self.course.recount()

    def join(self) -> None:
        with self._lock:
            if self.installed is not None:
                self.installed.stream.join()

    def nothing_managed(self) -> Exception:
        """The error of a model of which nothing is managed."""
        parts = walk(self.model)
        return nothing_managed(
            self.config.include_patterns, self.config.exclude_patterns, _module_names(self.model), _names(parts)
        )

    def memory_usage(self) -> GPUMemoryUsage:
        plan = self.plan
        ring = plan.ring_bytes if self.installed is not None else 0
        return GPUMemoryUsage(ring, self.rest.nbytes, ring + plan.resident_bytes + self.rest.nbytes)

    def streamed_units(self) -> list[str]:
        assert self.installed is not None
        return [unit.name for block in self.installed.streamed for unit in block]

    def resident_units(self) -> list[str]:
        assert self.installed is not None
        return [unit.name for unit in self.installed.resident]

    @property
    def plan(self) -> Plan:
        assert self.installed is not None
        return self.installed.plan


def _respread(timings: Timings, order: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(timings.compute_ns(order)) if timings.forwards else (0,) * len(order)


def describe(plan: Plan, phase: Phase) -> str:
    return (
        f"{phase}: {count(len(plan.streamed), 'block')} of {format_bytes(plan.streamed_bytes)} stream through "
        f"{format_bytes(plan.ring_bytes)}, {format_bytes(plan.resident_bytes)} are resident; a forward is predicted to "
        f"take {format_seconds(plan.predicted.time_ns / 1e9)} (strategy {plan.strategy})"
    )


def _select(model: nn.Module, parts: Parts, config: OffloadConfig) -> Selection:
    selection = select(config.include_patterns, config.exclude_patterns, _module_names(model), _names(parts))
    for kind, patterns in (("include", selection.unmatched_include), ("exclude", selection.unmatched_exclude)):
        if patterns:
            _log.warning("%s_patterns that match nothing in this model: %s", kind, ", ".join(patterns))
    return selection


def _module_names(model: nn.Module) -> list[ModuleName]:
    named = model.named_modules(remove_duplicate=False)
    return [ModuleName(path, class_names(type(module))) for path, module in named]


def _names(parts: Parts) -> list[str]:
    return [name for group in parts.parameters for name in group.names]


def _host(param: Param) -> torch.Tensor:
    return param.tensor


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
