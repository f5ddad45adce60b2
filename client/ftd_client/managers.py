"""Managers by name, and the module functions that act on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd_client.manager import Model, OffloadManager
from ftd_client.memory_usage import GPUMemoryUsage
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.phase.course import Phase

DEFAULT_MANAGER_NAME = "default"

# the one table of the process: what a name means to these functions
_managers: dict[str, OffloadManager] = {}
_costs = CopyCosts()
_lock = threading.Lock()


def get_offload_manager(name: str = DEFAULT_MANAGER_NAME) -> OffloadManager:
    """The manager of that name; made when it is asked for the first time."""
    with _lock:
        if name not in _managers:
            _managers[name] = OffloadManager(name, _costs)
        return _managers[name]


def init(config: OffloadConfig | None = None, name: str = DEFAULT_MANAGER_NAME) -> OffloadManager:
    """The manager of that name, with `config` for its next `offload()`."""
    manager = get_offload_manager(name)
    if config is not None:
        manager.set_config(config)
    return manager


def offload(
    model: Model,
    config: OffloadConfig | None = None,
    name: str = DEFAULT_MANAGER_NAME,
    compile_fn: Callable[..., Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Model:
    """See `OffloadManager.offload`."""
    return get_offload_manager(name).offload(model, config, compile_fn, device=device)


def offload_from_profile(
    model: Model,
    profile_directory: str | Path,
    config: OffloadConfig | None = None,
    name: str = DEFAULT_MANAGER_NAME,
    compile_fn: Callable[..., Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Model:
    """See `OffloadManager.offload_from_profile`."""
    manager = get_offload_manager(name)
    return manager.offload_from_profile(model, profile_directory, config, compile_fn, device=device)


def offload_block(block_name: str, name: str = DEFAULT_MANAGER_NAME) -> AbstractContextManager[None]:
    """See `OffloadManager.offload_block`."""
    return get_offload_manager(name).offload_block(block_name)


def release(name: str = DEFAULT_MANAGER_NAME, *, preserve_model: bool = True) -> None:
    """See `OffloadManager.release`."""
    get_offload_manager(name).release(preserve_model=preserve_model)


def set_config(config: OffloadConfig, name: str = DEFAULT_MANAGER_NAME) -> None:
    """See `OffloadManager.set_config`."""
    get_offload_manager(name).set_config(config)


def update_state(name: str = DEFAULT_MANAGER_NAME, *, replay_generation: int = -1) -> Phase:
    """See `OffloadManager.update_state`."""
    return get_offload_manager(name).update_state(replay_generation=replay_generation)


def save_profile(profile_directory: str | Path | None = None, name: str = DEFAULT_MANAGER_NAME) -> Path:
    """See `OffloadManager.save_profile`."""
    return get_offload_manager(name).save_profile(profile_directory)


def load_profile(
    profile_directory: str | Path | None = None, model: nn.Module | None = None, name: str = DEFAULT_MANAGER_NAME
) -> None:
    """See `OffloadManager.load_profile`."""
    get_offload_manager(name).load_profile(profile_directory, model)


def get_gpu_memory_usage(name: str = DEFAULT_MANAGER_NAME) -> GPUMemoryUsage:
    """See `OffloadManager.get_gpu_memory_usage`."""
    return get_offload_manager(name).get_gpu_memory_usage()


def pause_profiling(name: str = DEFAULT_MANAGER_NAME) -> None:
    """See `OffloadManager.pause_profiling`."""
    get_offload_manager(name).pause_profiling()


def suspend_profiling(name: str = DEFAULT_MANAGER_NAME) -> None:
    """See `OffloadManager.suspend_profiling`."""
    get_offload_manager(name).suspend_profiling()


def resume_profiling(name: str = DEFAULT_MANAGER_NAME) -> None:
    """See `OffloadManager.resume_profiling`."""
    get_offload_manager(name).resume_profiling()


def clear_profiling_durations(name: str = DEFAULT_MANAGER_NAME) -> None:
    """See `OffloadManager.clear_profiling_durations`."""
    get_offload_manager(name).clear_profiling_durations()


def offload_units(name: str = DEFAULT_MANAGER_NAME) -> list[str]:
    """See `OffloadManager.offload_units`."""
    return get_offload_manager(name).offload_units()


def resident_units(name: str = DEFAULT_MANAGER_NAME) -> list[str]:
    """See `OffloadManager.resident_units`."""
    return get_offload_manager(name).resident_units()


def collect_offload_timing(name: str = DEFAULT_MANAGER_NAME) -> NoReturn:
    """Not built yet: raises `NotBuiltError`."""
    get_offload_manager(name).collect_offload_timing()


def reset_offload_timing(name: str = DEFAULT_MANAGER_NAME) -> NoReturn:
    """Not built yet: raises `NotBuiltError`."""
    get_offload_manager(name).reset_offload_timing()


def update_offload_timing(name: str = DEFAULT_MANAGER_NAME) -> NoReturn:
    """Not built yet: raises `NotBuiltError`."""
    get_offload_manager(name).update_offload_timing()


def request_strategy_replan(name: str = DEFAULT_MANAGER_NAME, *, manual_update_state: bool = False) -> NoReturn:
    """Not built yet: raises `NotBuiltError`."""
    get_offload_manager(name).request_strategy_replan(manual_update_state=manual_update_state)


def strategy_replan_status(name: str = DEFAULT_MANAGER_NAME) -> NoReturn:
    """Not built yet: raises `NotBuiltError`."""
    get_offload_manager(name).strategy_replan_status()
