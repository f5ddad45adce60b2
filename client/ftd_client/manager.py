"""The manager of an offloaded model, by name: a thin face of `Offloaded`, and what holds before and after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from ftd._version import __version__
from ftd.config.later import refuse_unbuilt
from ftd.config.offload import OffloadConfig
from ftd.errors import NotBuiltError
from ftd.plan import store
from ftd.plan.plan import Plan
from ftd_client.load.placement import check_device
from ftd_client.memory_usage import GPUMemoryUsage
from ftd_client.offloaded import Offloaded
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.phase.course import Phase
from ftd_client.stream.host import PinnedMemoryError
from ftd_client.stream.units import OffloadError

_log = logging.getLogger("ftd")

Model = TypeVar("Model", bound=nn.Module)

#: Fields that the engine is built from: they need `release()` and a new `offload()`.
_FIXED = (
    "enabled", "gpu_device", "pinned_memory", "pinned_memory_mode", "shm_enabled", "shm_namespace", "skip_discovery",
    "external_compile", "transfer_mode", "include_patterns", "exclude_patterns", "profile_mode",
)  # fmt: skip
#: Read once as well, where another value only warns.
_ONE_SHOT = ("offload_timing", "piecewise_prefetch", "enable_instrumentation", "instrumentation_output_dir")


class ConfigInUseError(OffloadError, RuntimeError):
    """A field that the engine was built from was to be changed while a model is offloaded."""

    code = "config_in_use"


class OffloadManager:
    """One offloaded model at a time. Made by `get_offload_manager`; thread-safe as far as forwards are.

    Args:
        name: of the manager, for messages.
        costs: of copies by device, shared between managers.
    """

    def __init__(self, name: str, costs: CopyCosts) -> None:
        self.name = name
        self._costs = costs
        self._config: OffloadConfig | None = None
        self._offloaded: Offloaded | None = None
        self._skip_honored = False

    # --- life -----------------------------------------------------------------------------------------------

    def offload(
        self,
        model: Model,
        config: OffloadConfig | None = None,
        compile_fn: Callable[..., Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Model:
        """Makes `model` run on the device though not all of its weights are there. Returns the same object.

        Args:
            model: on meta with `shm_enabled`, else with CPU tensors of its own.
            config: None takes that of `init` or `set_config`, else the defaults.
            compile_fn: refused until compiled offload is built.
            device: overrides `gpu_device`.

        Raises:
            NotBuiltError: the configuration or `compile_fn` asks for what this release does not build.
            OffloadError: the model cannot be offloaded, or this manager has one already.
            OffloadConfigError: nothing would be managed.
            BudgetError: no plan fits `max_gpu_mem_fraction`; it names the smallest budget that one does.
            PinnedMemoryError: `pinned_memory` on a host without CUDA.
            NoCreatorError, AttachTimeoutError, BindError, …: as `attach` and `bind`, with `shm_enabled`.
        """
        if self._offloaded is not None:
            raise OffloadError(
                f"manager {self.name!r} has a model already: {type(self._offloaded.model).__qualname__}",
                "call release() first, or give another name",
            )
        config = config if config is not None else self._config if self._config is not None else OffloadConfig()
        refuse_unbuilt(config)
        if compile_fn is not None:
            raise NotBuiltError(f"compile_fn is not built yet in ftd {__version__}", "leave it out")
        self._config = config
        if not config.enabled:
            self._skip_honored = False
            _log.info(
                "offload() of manager %r left %s untouched: enabled is false", self.name, type(model).__qualname__
            )
            return model
        self._offloaded = Offloaded(model, config, _device(config, device), self._costs)
        self._skip_honored = self._offloaded.skip_honored
        return model

    def release(self, *, preserve_model: bool = True) -> None:
        """Takes the engine out of the model and gives all its memory back. Without a model, nothing happens.

        Args:
            preserve_model: put the weights back where `offload()` found them; otherwise managed parameters are left on
                meta, which frees the host's memory too.
        """
        offloaded = self._offloaded
        if offloaded is not None:
            offloaded.refuse_inside("release()")
            self._offloaded = None
            offloaded.close(preserve_model=preserve_model)

    def set_config(self, config: OffloadConfig) -> None:
        """The configuration of the next `offload()`; of a model that is offloaded, what can change meanwhile does:
        iterations count at once, what a plan depends on with the next plan.

        Raises:
            ConfigInUseError: a field differs that the engine was built from.
        """
        if self._offloaded is not None:
            now = self._offloaded.config
            fixed = [field for field in _FIXED if getattr(now, field) != getattr(config, field)]
            if fixed:
                texts = [f"{f}: {getattr(now, f)!r} is in use, {getattr(config, f)!r} found" for f in fixed]
                raise ConfigInUseError(
                    f"manager {self.name!r} has a model, and these fields are read once: {'; '.join(texts)}",
                    "call release() and offload() again",
                )
            for field in _ONE_SHOT:
                if getattr(now, field) != getattr(config, field):
                    _log.warning("%s is read once: %r stays until release()", field, getattr(now, field))
            self._offloaded.configure(config)
        self._config = config

    # --- forwards and phases --------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """`idle`, `discovery`, `profiling` or `inference`."""
        return self._offloaded.course.phase if self._offloaded else Phase.IDLE

    @property
    def iters_before_inference(self) -> int:
        """Forwards of the whole model until the inference phase; 0 in it, and where nothing is offloaded."""
        return self._offloaded.course.left if self._offloaded else 0

    @property
    def skip_discovery_honored(self) -> bool:
        """Whether the last `offload()` skipped discovery as configured; False where it had to take place."""
        return self._skip_honored

    def update_state(self, *, replay_generation: int = -1) -> Phase:
        """Says that a forward has ended, where none of the whole model did (pieces of it were called instead).

        Called by the engine after each forward of the whole model.

        Raises:
            NotBuiltError: `replay_generation` is given: it counts replays of captured graphs.
        """
        if replay_generation != -1:
            raise NotBuiltError(f"replay_generation is not built yet in ftd {__version__}", "leave it out")
        offloaded = self._needed("update_state")
        offloaded.refuse_inside("update_state()")
        return offloaded.update_state()

    def offload_block(self, block_name: str) -> AbstractContextManager[None]:
        """Marks a block by hand: `with manager.offload_block("decoder"): …` inside of the model's forward. Parameters
        that are used inside belong together, as a layer of that name. Does nothing while no model is offloaded.

        Raises:
            OffloadError: on entering, when `skip_discovery` is honoured: such blocks are found by discovery.
        """
        return _Region(self, block_name)

    def join_after_forward(self) -> None:
        """Makes what is computed next wait for all copies that were submitted."""
        self._needed("join_after_forward").join()

    def pause_profiling(self) -> None:
        """Forwards of profiling are neither measured nor counted until `resume_profiling`; instruments stay."""
        self._needed("pause_profiling").pause(True)

    def suspend_profiling(self) -> None:
        """As `pause_profiling`, and takes the instruments out, so that forwards run as they will in inference."""
        self._needed("suspend_profiling").suspend(True)

    def resume_profiling(self) -> None:
        """Ends a pause and a suspension."""
        offloaded = self._needed("resume_profiling")
        offloaded.pause(False)
        offloaded.suspend(False)

    def clear_profiling_durations(self) -> None:
        """Drops what was measured; profiling counts its forwards from 0 again."""
        self._needed("clear_profiling_durations").clear_timings()

    # --- profiles -------------------------------------------------------------------------------------------

    def save_profile(self, profile_directory: str | Path | None = None) -> Path:
        """Writes what was measured of this model; `load_profile` starts from it without measuring.

        Args:
            profile_directory: None takes `profile_storage_dir`.

        Raises:
            OffloadError: nothing is measured yet, no directory is named, or `profile_read_only` is set.
            ProfileStorageError: it cannot be written.
        """
        offloaded = self._needed("save_profile")
        if offloaded.config.profile_read_only:
            raise OffloadError(
                f"save_profile(): profile_read_only is set for manager {self.name!r}", "set profile_read_only=False"
            )
        return store.save(_directory(profile_directory, offloaded.config), offloaded.profile())

    def load_profile(self, profile_directory: str | Path | None = None, model: nn.Module | None = None) -> None:
        """Goes to the inference phase by a stored profile, with no forward measured.

        Args:
            profile_directory: None takes `profile_storage_dir`.
            model: offloaded first, by the configuration that is set, when this manager has none.

        Raises:
            ProfileMissingError: there is no profile.
            ProfileMismatchError: none fits; every difference is listed.
        """
        if model is not None and self._offloaded is None:
            self.offload(model)
        offloaded = self._needed("load_profile")
        if model is not None and offloaded.model is not model:
            raise OffloadError(
                f"manager {self.name!r} has another model than the one given", "give the model that it has, or none"
            )
        offloaded.restore(store.load(_directory(profile_directory, offloaded.config), offloaded.identity))

    def offload_from_profile(
        self,
        model: Model,
        profile_directory: str | Path,
        config: OffloadConfig | None = None,
        compile_fn: Callable[..., Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Model:
        """`offload()` and `load_profile()`: the first forward is one of the inference phase.

        Raises:
            As both; the model is released then.
        """
        self.offload(model, config, compile_fn, device=device)
        if self._offloaded is not None:
            try:
                self.load_profile(profile_directory)
            except BaseException:
                self.release()
                raise
        return model

    # --- facts ----------------------------------------------------------------------------------------------

    def get_gpu_memory_usage(self) -> GPUMemoryUsage:
        """GPU memory that was allocated for this model; zeros where nothing is offloaded."""
        return self._offloaded.memory_usage() if self._offloaded else GPUMemoryUsage(0, 0, 0)

    def offload_units(self) -> list[str]:
        """Names of the units that stream, in the order of execution."""
        return self._offloaded.streamed_units() if self._offloaded else []

    def resident_units(self) -> list[str]:
        """Names of the managed units that stay on the device."""
        return self._offloaded.resident_units() if self._offloaded else []

    @property
    def plan(self) -> Plan | None:
        """The plan at work (`ftd_client.strategy.Plan`), with what it is predicted to take; None without a model."""
        return self._offloaded.plan if self._offloaded else None

    def collect_offload_timing(self) -> NoReturn:
        self._not_built("collect_offload_timing")

    def reset_offload_timing(self) -> NoReturn:
        self._not_built("reset_offload_timing")

    def update_offload_timing(self) -> NoReturn:
        self._not_built("update_offload_timing")

    def request_strategy_replan(self, *, manual_update_state: bool = False) -> NoReturn:
        del manual_update_state
        self._not_built("request_strategy_replan")

    def strategy_replan_status(self) -> NoReturn:
        self._not_built("strategy_replan_status")

    def _not_built(self, name: str) -> NoReturn:
        raise NotBuiltError(f"{name}() is not built yet in ftd {__version__}", "plans are made once, after profiling")

    def _needed(self, what: str) -> Offloaded:
        if self._offloaded is None:
            raise OffloadError(f"{what}(): manager {self.name!r} has no model", "call offload() first")
        return self._offloaded

    def __repr__(self) -> str:
        return f"<OffloadManager {self.name!r}, {self.phase}>"


class _Region:
    """`with manager.offload_block(name)`; finds the model when it is entered, and may be entered again."""

    def __init__(self, manager: OffloadManager, name: str) -> None:
        self._manager = manager
        self._name = name
        self._open: list[AbstractContextManager[None] | None] = []

    def __enter__(self) -> None:
        offloaded = self._manager._offloaded
        region = offloaded.region(self._name) if offloaded is not None else None
        if region is not None:
            region.__enter__()
        self._open.append(region)

    def __exit__(self, *error: Any) -> None:
        region = self._open.pop()
        if region is not None:
            region.__exit__(*error)


def _directory(given: str | Path | None, config: OffloadConfig) -> Path:
    found = given if given is not None else config.profile_storage_dir
    if found is None:
        raise OffloadError("no directory for profiles: none given, and profile_storage_dir is not set", "give one")
    return Path(found)


def _device(config: OffloadConfig, device: torch.device | str | None) -> torch.device:
    here = torch.cuda.is_available()
    if config.pinned_memory and not here:
        raise PinnedMemoryError(
            "pinned_memory is true, and there is no CUDA to pin memory for",
            "set pinned_memory=False on hosts without a GPU",
        )
    if device is None:
        device = torch.device("cuda", config.gpu_device) if here else torch.device("cpu")
    target = check_device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return target
