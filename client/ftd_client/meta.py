"""Modules whose parameters hold no memory while their buffers are real."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside get their parameters on the meta device; buffers and all other tensors stay real.

    The way to build a model for `bind` whose non-persistent buffers are computed in constructors: under
    `torch.device("meta")` those values are lost, and no checkpoint holds them. Each parameter's memory is
    allocated for a moment, and freed when the module registers it; init code that runs after that costs nothing.

    Acts for modules built by the entering thread, by the hook of torch that is meant for it. Ties keep identity. A
    subclass of Parameter stays as it is, since what it keeps beside its bytes is unknown here; `bind` refuses it
    by name. Parameters that are written past `register_parameter` stay real.
    """
    owner = threading.get_ident()
    # A real Parameter may be registered twice (a tie made before registration). By id with a weak reference beside
    # it, because holding the Parameter would hold its memory until the model is complete.
    twins: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != owner or parameter.is_meta or type(parameter) is not nn.Parameter:
            return None
        known = twins.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        twins[id(parameter)] = (weakref.ref(parameter), twin)
        return twin

    # torch types the hook as returning None, and documents that it may return a Parameter
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
