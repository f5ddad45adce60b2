"""What stands in a module's place for a parameter whose bytes are not on the device.

It has the parameter's shape, type and device, and no memory. Most code never computes with one: a module's own
parameters are put in its place before its forward runs. Whatever reaches for it in another way (functional use of
another module's weight, a method other than forward) gets the bytes on demand, in memory of their own, at the next
operation. A write is refused, since it would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ftd_client.stream.units import OffloadError


@dataclass
class Access:
    """The ways to a parameter's bytes, one for all stand-ins of it: `detach()` and `state_dict()` make more of them.

    Attributes:
        fetch: makes a tensor of it on the device, in fresh memory.
        host: the tensor that holds its bytes on the host; not to be written.
        refused: told of a tensor that `fetch` gave when a write to it was refused; may be called from any thread.
    """

    fetch: Callable[[], torch.Tensor]
    host: Callable[[], torch.Tensor]
    refused: Callable[[torch.Tensor], object]

    def release(self) -> None:
        """From now on the weight on the host is all there is."""
        self.fetch = self.host


class Parked(torch.Tensor):
    """A parameter that is not on the device now. `isinstance(parked, nn.Parameter)` holds.

    Attributes:
        ftd_name: its dotted name. Prefixed, since parameters carry attributes of their own.
    """

    ftd_name: str
    ftd_access: Access

    @staticmethod
    def of(name: str, like: torch.Tensor, device: torch.device, access: Access) -> Parked:
        """A stand-in on `device` of the shape, strides and type of `like`, with the Python attributes of `like`."""
        parked: Parked = torch.Tensor._make_wrapper_subclass(
            Parked, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        parked.__dict__.update(like.__dict__)
        parked.ftd_name, parked.ftd_access = name, access
        # what makes `isinstance(x, nn.Parameter)` true of tensor subclasses
        parked._is_param = True
        return parked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations of Python's level run as a whole on the fetched tensors: on the path that the resident model's
        take. Properties and what asks for no values go on to the stand-in itself."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Parked) else None
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if first is not None:
            if func in _MOVING:
                device, dtype = _target(func, first, args[1:], kwargs)
                if device.type != first.device.type:
                    return func(first.ftd_access.host().detach(), *args[1:], **kwargs)
                if dtype == first.dtype and not kwargs.get("copy"):
                    return first
            if func in _REFUSED or (func is _GRAD_SWITCH and (*args[1:], *kwargs.values()) != (False,)):
                _refuse_write(first.ftd_name)
            if func is _GRAD_SWITCH or (func == _SET_DATA and args[1] is first):
                return first
            if getattr(func, "__name__", "") == "__set__":
                _refuse_write(first.ftd_name)
        return _on_fetched(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Where code below Python's level meets one: operations see the fetched tensors one by one."""
        if func is torch.ops.aten.detach.default:
            parked = args[0]
            return Parked.of(parked.ftd_name, parked, parked.device, parked.ftd_access)
        return _on_fetched(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise OffloadError(
            f"{self.ftd_name} is offloaded: a copy of the model would share its place on the device",
            "call release() before the model is copied",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # saving takes the bytes of the host
        return self.ftd_access.host().detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape, kind = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"Parked({self.ftd_name}, {shape} of {kind}, not on {self.device} now)"


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


#: What describes a tensor and asks for no values; by the functions that torch hands to `__torch_function__`.
_DESCRIBING: set[Any] = {
    *_properties(
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu",
        "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "ndim", "names",
        "itemsize", "nbytes", "_version", "data", "name", "output_nr", "retains_grad",
    ),
    torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel,
    torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.detach, torch.Tensor.__len__, torch.Tensor.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.is_inference, torch.is_inference,
    torch.Tensor.get_device, torch.Tensor.is_pinned, torch.Tensor.is_shared, torch.Tensor.storage_offset,
    torch._has_compatible_shallow_copy_type,
}  # fmt: skip

_TYPES = {
    torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.double: torch.float64,
    torch.Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip
_MOVING: set[Any] = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, *_TYPES}
_GRAD_SWITCH = torch.Tensor.requires_grad_
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

#: What hands out an address, which would outlive the fetched bytes.
_REFUSED: set[Any] = {torch.Tensor.data_ptr, torch.Tensor.__cuda_array_interface__.__get__}


def _target(
    func: Any, parked: Parked, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """What a call of `to`, `cuda` or `cpu` asks for."""
    device = {torch.Tensor.cpu: torch.device("cpu"), torch.Tensor.cuda: torch.device("cuda")}.get(func, parked.device)
    dtype = _TYPES.get(func, parked.dtype)
    for found in (*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(found, torch.Tensor):
            device, dtype = found.device, found.dtype
        elif isinstance(found, torch.dtype):
            dtype = found
        elif isinstance(found, str | torch.device):
            device = torch.device(found)
    return device, dtype


def _on_fetched(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `func` on fetched tensors.

    Raises:
        OffloadError: it wrote to one, which their version counters tell.
    """
    fetched: list[tuple[Parked, torch.Tensor, int]] = []

    def fetch(parked: Parked) -> torch.Tensor:
        tensor = parked.ftd_access.fetch()
        fetched.append((parked, tensor, tensor._version))
        return tensor

    args, kwargs = tree_map_only(Parked, fetch, (args, kwargs))
    result = func(*args, **kwargs)
    for parked, tensor, version in fetched:
        if tensor._version != version:
            parked.ftd_access.refused(tensor)
            _refuse_write(parked.ftd_name)
    return result


def _refuse_write(name: str) -> NoReturn:
    raise OffloadError(
        f"{name} is offloaded: its bytes are not on the device, where they were about to be changed or their address "
        "taken, and neither would last",
        "call release() before weights are changed, or name it in exclude_patterns",
    )
