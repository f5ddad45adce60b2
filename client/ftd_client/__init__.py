"""The client of ftd: attach a worker to a namespace's weights, bind them to a model, load them to a device.

Importing this initialises no CUDA, so that a server may import it before it forks its workers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftd import __version__
from ftd.errors import (
    AttachTimeoutError,
    BindError,
    CreatorDiedError,
    CreatorFailedError,
    CreatorHungError,
    FtdError,
    NoCreatorError,
    ProtocolMismatchError,
)
from ftd.errors import CreatorDiedError as ShmCreatorDiedError
from ftd.errors import CreatorFailedError as ShmCreatorFailedError
from ftd_client.bind import BindReport
from ftd_client.follower import Follower, attach
from ftd_client.load.move import MoveReport
from ftd_client.meta import meta_parameters
from ftd_client.ranks import OtherWeightsError

if TYPE_CHECKING:
    from ftd.config.load_offload import load_config, load_config_from_env, load_config_from_file
    from ftd.config.offload import OffloadConfig
    from ftd.wire.publish import Published
    from ftd_client.manager import OffloadManager
    from ftd_client.managers import (
        DEFAULT_MANAGER_NAME,
        clear_profiling_durations,
        collect_offload_timing,
        get_gpu_memory_usage,
        get_offload_manager,
        init,
        load_profile,
        offload,
        offload_block,
        offload_from_profile,
        offload_units,
        pause_profiling,
        release,
        request_strategy_replan,
        reset_offload_timing,
        resident_units,
        resume_profiling,
        save_profile,
        set_config,
        strategy_replan_status,
        suspend_profiling,
        update_offload_timing,
        update_state,
    )
    from ftd_client.memory_usage import GPUMemoryUsage
    from ftd_client.publishing import publish
    from ftd_client.stream.units import OffloadError

#: Names of offloading by their modules, loaded when they are first asked for: a worker that only attaches and binds
#: does not pay for the planner and pydantic (0.3 s).
_ON_DEMAND = {
    "OffloadConfig": "ftd.config.offload",
    "OffloadManager": "ftd_client.manager",
    "GPUMemoryUsage": "ftd_client.memory_usage",
    "OffloadError": "ftd_client.stream.units",
    "Published": "ftd.wire.publish",
    "publish": "ftd_client.publishing",
    **dict.fromkeys(("load_config", "load_config_from_env", "load_config_from_file"), "ftd.config.load_offload"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ON_DEMAND.get(name, "ftd_client.managers")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DEFAULT_MANAGER_NAME",
    "AttachTimeoutError",
    "BindError",
    "BindReport",
    "CreatorDiedError",
    "CreatorFailedError",
    "CreatorHungError",
    "Follower",
    "FtdError",
    "GPUMemoryUsage",
    "MoveReport",
    "NoCreatorError",
    "OffloadConfig",
    "OffloadError",
    "OffloadManager",
    "OtherWeightsError",
    "ProtocolMismatchError",
    "Published",
    "ShmCreatorDiedError",
    "ShmCreatorFailedError",
    "__version__",
    "attach",
    "clear_profiling_durations",
    "collect_offload_timing",
    "get_gpu_memory_usage",
    "get_offload_manager",
    "init",
    "load_config",
    "load_config_from_env",
    "load_config_from_file",
    "load_profile",
    "meta_parameters",
    "offload",
    "offload_block",
    "offload_from_profile",
    "offload_units",
    "pause_profiling",
    "publish",
    "release",
    "request_strategy_replan",
    "reset_offload_timing",
    "resident_units",
    "resume_profiling",
    "save_profile",
    "set_config",
    "strategy_replan_status",
    "suspend_profiling",
    "update_offload_timing",
    "update_state",
]
