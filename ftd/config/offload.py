"""OffloadConfig: how a model is offloaded. Its loading from files and environment is in `load_offload.py`.

Beside the fields of the contract only their types stand elsewhere, in `offload_fields.py`; what each does is its
docstring, from which `offload_docs.py` makes the page of the documentation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ftd.config.fields import against
from ftd.config.offload_fields import (
    NAMESPACE_RULE,
    Blocks,
    Directory,
    Flag,
    Fraction,
    Iterations,
    MaybeDirectory,
    Namespace,
    OffloadTiming,
    Ordinal,
    PiecewisePrefetch,
    PinnedMemoryMode,
    ProfileMode,
    Scale,
    StrategyObject,
    TargetPatterns,
    TransferMode,
    Wait,
)
from ftd.config.problems import nearest

#: Transfer modes that move whole blocks.
_BLOCK_MODES = "allocation_block_transfer or raw_block_transfer"


class OffloadConfig(BaseModel):
    """How a model is offloaded.

    Validated when it is made and when it is copied by `model_copy`; assigning to a field or changing a list in place
    is not. Readers take their values once: `offload()` when it builds the engine, `set_config` as it says.

    Raises:
        ValidationError: pydantic's, a ValueError; it lists every field that is wrong. The load functions word it as
            an `OffloadConfigError`, with the origin of each value.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    enabled: Flag = True
    """Whether to offload at all. When false, `offload()` returns the model untouched and says so.

    Environment: `FT_ENABLED`. Where values come from the environment alone, with no file, the default is false.
    """

    gpu_device: Ordinal = 0
    """CUDA ordinal of the GPU that computes, from 0. `offload(device=...)` overrides it.

    Without CUDA, and with `pinned_memory` false, the device is the CPU whatever this says.

    Environment: `FT_GPU_DEVICE`.
    """

    pinned_memory: Flag = True
    """Whether weights on the host are page-locked, so that copies to the GPU do not block.

    When true on a host without CUDA, `offload()` raises a RuntimeError: there is nothing to pin for.

    Environment: `FT_PINNED_MEMORY`.
    """

    pinned_memory_mode: PinnedMemoryMode = "torch"
    """How a model's own tensors are page-locked: copied into pinned memory (`torch`), or locked where they are
    (`host_register`).

    `torch` allocates a pinned copy of each tensor. `host_register` registers the memory that a tensor has, without a
    copy, and so takes less host memory; where the CUDA runtime cannot be bound, `torch` takes its place with a
    warning, while this field keeps what was asked for. Without effect when `pinned_memory` is false, and on weights
    in shared memory, which are always registered where they are.

    Environment: `FT_PINNED_MEMORY_MODE`.
    """

    shm_enabled: Flag = False
    """Whether the weights come from the shared memory of a running creator. Needs `shm_namespace`.

    It starts no creator and elects none: the daemon of that namespace must run, or come within `shm_wait_timeout`.

    Environment: `FT_SHM_ENABLED`.
    """

    shm_namespace: Namespace = Field(default=None, validate_default=True)
    """Namespace whose weights are used: 1 to 64 characters, letters, digits, `.`, `_` and `-`.

    `compute_shm_namespace` derives one from a model's path. Required when `shm_enabled` is true.

    Environment: `FT_SHM_NAMESPACE`.
    """

    shm_wait_timeout: Wait = 0.0
    """Seconds to wait for the creator, from 0. Means what `timeout` of `attach` means.

    Positive: bounds the whole wait, for a creator to appear and for its weights to be ready. 0: no creator is an
    error at once, and one that loads is waited for as long as it lives and progresses.

    Environment: `FT_SHM_WAIT_TIMEOUT`.
    """

    discovery_iters: Iterations = 1
    """Forwards of the discovery phase, in which the order of blocks is learned, from 0.

    A phase ends after a forward, so that 0 acts like 1.

    Environment: `FT_DISCOVERY_ITERS`.
    """

    skip_discovery: Flag = False
    """Whether to begin with profiling, taking blocks and order from the modules that the patterns select.

    When no module is selected, discovery takes place after all, a warning says so, and the manager's
    `skip_discovery_honored` is false. `offload_block()` raises while the skip is honoured. Read once, when the first
    `offload()` builds the engine: another value needs `release()` and a new `offload()`, and `set_config` with one
    raises a RuntimeError until then.

    Environment: `FT_SKIP_DISCOVERY`.
    """

    profiling_iters: Iterations = 10
    """Forwards of the profiling phase, in which compute is measured, from 0.

    A phase ends after a forward, so that 0 acts like 1; with either, the report on the profile's quality warns. Only
    a stored profile starts in inference without a profiling forward.

    Environment: `FT_PROFILING_ITERS`.
    """

    external_compile: Flag = False
    """Whether the offloaded layers are made ready for a `torch.compile` of each by the caller, after profiling.

    Compiles nothing itself; `offload(compile_fn=...)` does. Needs a transfer mode that moves blocks.

    Environment: `FT_EXTERNAL_COMPILE`.
    """

    transfer_budget_scale: Scale = 1.0
    """Factor on the time that copies may take behind compute, above 0.

    Below 1 leaves a margin for noise in the profile: 0.95 plans with 5 % less time. Counts in latency mode; in
    memory mode the planner may set it aside to meet `max_gpu_mem_fraction`.

    Environment: `FT_TRANSFER_BUDGET_SCALE`.
    """

    transfer_mode: TransferMode = "allocation_block_transfer"
    """How weights move: a block in one copy (`allocation_block_transfer`), a block as one contiguous region
    (`raw_block_transfer`), or tensor by tensor (`strategy`).

    Only `strategy` supports tensors that several layers share; the block modes refuse them by name.

    Environment: `FT_TRANSFER_MODE`.
    """

    num_blocks: Blocks = 4
    """Most layers that the GPU's ring of slots has room for, from 2: their number times the largest layer.

    More of them take more GPU memory and let copies run further ahead; 2 can do where a layer computes for longer
    than it is copied.

    Environment: `FT_NUM_BLOCKS`.
    """

    min_blocks: Blocks = Field(default=4, validate_default=True)
    """Fewest slots that the planner may try, from 2 up to `num_blocks`. Binds slots of a layer's size only.

    The planner takes the best number between the two.

    Environment: `FT_MIN_BLOCKS`.
    """

    max_gpu_mem_fraction: Fraction = None
    """Share of the device's memory that the process may use at its peak, above 0 and up to 1. None: latency mode.

    Set, it selects memory mode: the plan of least time within the budget, measured activations included, the CUDA
    context not. What is free at run time caps it.

    Environment: `FT_MAX_GPU_MEM_FRACTION`.
    """

    profile_storage_dir: MaybeDirectory = None
    """Directory where `save_profile` and `load_profile` keep profiles when they are given none.

    Environment: `FT_PROFILE_STORAGE_DIR`.
    """

    profile_read_only: Flag = False
    """Whether profiles are only loaded, and never saved.

    Environment: `FT_PROFILE_READ_ONLY`.
    """

    load_strategy: StrategyObject = None
    """A strategy that plans in place of the automatic choice. None leaves the choice to the planner.

    Only Python code can give one; a file or variable can say `none`.

    Environment: `FT_LOAD_STRATEGY`.
    """

    enable_instrumentation: Flag = False
    """Whether the arguments with which components are made are written down, for debugging.

    Environment: `FT_ENABLE_INSTRUMENTATION`.
    """

    instrumentation_output_dir: Directory = ".ftd/instrumentation"
    """Directory that `enable_instrumentation` writes to.

    Environment: `FT_INSTRUMENTATION_OUTPUT_DIR`.
    """

    offload_timing: OffloadTiming = "off"
    """Measuring of copies, compute and waits in inference: `off`, by events of ordinary forwards (`eager`), or by
    events that a CUDA graph replays (`cuda_graph`).

    Needs a transfer mode that moves blocks. `cuda_graph` is what a replan under `manual_update_state` needs, and
    itself needs PyTorch 2.8. Read once, when the first `offload()` builds the engine; a later `set_config` with
    another value warns.

    Environment: `FT_OFFLOAD_TIMING`.
    """

    piecewise_prefetch: PiecewisePrefetch = "warn"
    """What happens when a join at the end of a captured piece makes compute wait for a copy: nothing (`off`), a
    warning (`warn`), or a `PiecewisePrefetchPolicyError` (`error`).

    Checked where the capturing code calls `join_after_forward()` before it ends a piece. Read once, when the first
    `offload()` builds the engine; a later `set_config` with another value warns.

    Environment: `FT_PIECEWISE_PREFETCH`.
    """

    include_patterns: TargetPatterns = Field(default_factory=lambda: ["*"])
    """Patterns of the modules or parameters to offload, by name or by class.

    `layers.*` and `name:layers.*` go by name, `class:*Expert*` by the class's short name or the one with its module.
    See [Patterns](#patterns).

    Environment: `FT_INCLUDE_PATTERNS`.
    """

    exclude_patterns: TargetPatterns = Field(default_factory=list)
    """Patterns of what stays on the GPU although `include_patterns` match it.

    The same three forms; here a `*` segment stands for one segment or more. See [Patterns](#patterns).

    Environment: `FT_EXCLUDE_PATTERNS`.
    """

    enable_diagnostics: Flag = False
    """Whether durations per block and the table of assignments are logged once a plan is made.

    It also compares the digest of a slot before its reuse, which finds weights that code changed unnoticed.

    Environment: `FT_ENABLE_DIAGNOSTICS`.
    """

    profile_mode: ProfileMode = "view"
    """How parameters reach the GPU while profiling: as views of memory allocated beforehand (`view`), by attribute
    getters (`getter`), or by torch's function hook (`torch_function`).

    `view` takes the most GPU memory and disturbs the measurement least; `getter` takes less and costs a call per
    access. `torch_function` is for models that neither can patch: slow, used in inference too, and only with
    `transfer_mode` `strategy`.

    Environment: `FT_PROFILE_MODE`.
    """

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        # before pydantic's own check, whose message names no other field
        if isinstance(data, Mapping):
            unknown = [str(key) for key in data if key not in cls.model_fields]
            if unknown:
                raise PydanticCustomError("unknown_field", "{what}", {"what": _unknown_text(unknown)})
        return data

    @field_validator("shm_namespace")
    @classmethod
    def _namespace_where_needed(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("shm_enabled") and not value:
            raise against("shm_enabled", f"a namespace ({NAMESPACE_RULE}), since shm_enabled is true")
        return value

    @field_validator("transfer_mode")
    @classmethod
    def _blocks_where_compiled(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("external_compile") and value == "strategy":
            raise against("external_compile", f"{_BLOCK_MODES}, since external_compile is true")
        return value

    @field_validator("min_blocks")
    @classmethod
    def _at_most_num_blocks(cls, value: int, info: ValidationInfo) -> int:
        # absent when num_blocks is itself invalid, which is reported anyway
        most = info.data.get("num_blocks")
        if most is not None and value > most:
            raise against("num_blocks", f"at most num_blocks, which is {most}")
        return value

    @field_validator("offload_timing")
    @classmethod
    def _timing_of_blocks_only(cls, value: str, info: ValidationInfo) -> str:
        if value != "off" and info.data.get("transfer_mode") == "strategy":
            raise against("transfer_mode", "off, since transfer_mode is strategy")
        return value

    @field_validator("profile_mode")
    @classmethod
    def _torch_function_by_tensor_only(cls, value: str, info: ValidationInfo) -> str:
        mode = info.data.get("transfer_mode")
        if value == "torch_function" and mode not in ("strategy", None):
            raise against("transfer_mode", f"view or getter, since transfer_mode is {mode}")
        return value

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed, validated as if newly made; explicitly set fields stay known as such.

        Raises:
            ValidationError: the result is not valid, be it by `update` or by what was assigned to this one.
        """
        values = dict(self.__dict__)
        if deep:
            values = copy.deepcopy(values)
        changes = dict(update or {})
        result = type(self).model_validate(values | changes)
        # validating has set every field
        result.__pydantic_fields_set__.clear()
        result.__pydantic_fields_set__.update(self.model_fields_set, changes)
        return result


def _unknown_text(names: list[str]) -> str:
    fields = OffloadConfig.model_fields
    return "; ".join(
        f"unknown field {name[:64]!r}: the nearest known one is {nearest(name, fields)!r}" for name in names
    )
