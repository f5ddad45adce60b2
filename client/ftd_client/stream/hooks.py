"""The one place where modules are patched: `forward` of scopes and of the whole model, undone exactly.

An instance attribute `forward` is found before the class's, by `module(x)` and `module.forward(x)` alike, and leaves
torch's own hooks of the module where they are: they run around it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from ftd._version import __version__
from ftd.errors import NotBuiltError
from ftd_client.phase.observe import Observer
from ftd_client.stream.parked import Parked
from ftd_client.stream.runtime import Stream
from ftd_client.stream.units import OffloadError, Unit

_log = logging.getLogger("ftd")

Forward = Callable[..., Any]


class Guard:
    """Lies in the attributes of an offloaded model, and keeps `copy.deepcopy` and pickle from taking the hooks along:
    those of the copy would run the original's weights."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OffloadError(
            f"{self._kind} is offloaded, and was about to be copied or pickled with its hooks",
            "call release() first, or save its state_dict()",
        )


class Hooks:
    """Patches made, in order; `close` takes them back in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def patch(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        """Puts `wrap(forward)` in place of a module's forward.

        Written past `__setattr__`, which some modules have of their own.
        """
        attributes = module.__dict__
        own = "forward" in attributes
        original = module.forward
        live = True
        inner = wrap(original)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if live else original(*args, **kwargs)

        def undo() -> None:
            nonlocal live
            live = False
            if attributes.get("forward") is not forward:
                # somebody wrapped it again: theirs stays, and this one passes calls on
                _log.warning(
                    "%s.forward was patched after it was offloaded: that patch stays", type(module).__qualname__
                )
            elif own:
                attributes["forward"] = original
            else:
                del attributes["forward"]

        attributes["forward"] = forward
        self._undo.append(undo)

    def guard(self, model: nn.Module) -> None:
        """Keeps the model from being copied while it is offloaded."""
        model.__dict__[_GUARD] = Guard(type(model).__qualname__)
        self._undo.append(lambda: model.__dict__.pop(_GUARD, None))

    def getters(self, modules: Iterable[nn.Module | None]) -> None:
        """Makes attribute access of parameters in these modules, and below them, fetch what is parked."""
        found = {module for top in modules if top is not None for module in top.modules()}
        for module in found:
            plain = module._parameters
            module.__dict__["_parameters"] = _Getters(plain)
            self._undo.append(functools.partial(module.__dict__.__setitem__, "_parameters", plain))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class _Getters(dict[str, torch.Tensor | None]):
    """A module's parameters, of which `module.name` gets those that are parked from where they are fetched.

    `nn.Module.__getattr__` looks names up here; listings (`parameters()`, `state_dict()`) see the stand-ins.
    """

    def __getitem__(self, name: str) -> torch.Tensor | None:
        value = super().__getitem__(name)
        return value.fetch() if isinstance(value, Parked) else value


_GUARD = "_ftd_guard"


def is_offloaded(model: nn.Module) -> bool:
    """Whether the model, or some module of it, is the root of an offloaded model."""
    return any(_GUARD in vars(module) for module in model.modules())


def streamed(stream: Stream, index: int, last: bool, forward: Forward) -> Forward:
    """The forward of a scope of step `index`. The hot path: it runs for every unit of every forward."""
    lock, enter, leave, ring = stream.lock, stream.enter, stream.leave, stream.ring
    low, high = ring.address, ring.address + ring.nbytes
    grad, tensor = torch.is_grad_enabled, torch.Tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiling_an_offloaded_model_is_not_built_yet()
        with lock:
            graded = grad()
            if graded:
                refuse_grad(stream.steps[index].name, (args, kwargs))
            enter(index)
            try:
                output = forward(*args, **kwargs)
                if type(output) is not tensor or low <= output.data_ptr() < high:
                    output = outliving(output, ring.holds)
            finally:
                if graded:
                    stream.outdate(index)
                leave(index, last)
            return output

    return run


def outliving(output: Any, is_ours: Callable[[torch.Tensor], bool]) -> Any:
    """`output` with copies of the tensors that lie in the ring: they would be overwritten while the caller has them."""
    if isinstance(output, torch.Tensor):
        return output.detach().clone() if is_ours(output) else output
    if type(output) in (tuple, list):
        kept = [outliving(item, is_ours) for item in output]
        return output if all(a is b for a, b in zip(kept, output, strict=True)) else type(output)(kept)
    if isinstance(output, tuple) and hasattr(output, "_make"):
        return type(output)._make(outliving(item, is_ours) for item in output)
    if isinstance(output, Mapping):
        for key, value in list(output.items()):
            kept_value = outliving(value, is_ours)
            if kept_value is not value:
                output[key] = kept_value  # type: ignore[index]
    return output


def refuse_grad(name: str, value: Any) -> None:
    """Looks for tensors in containers of Python; what hides one elsewhere is met by `Stream.outdate` in backward.

    Raises:
        OffloadError: an input requires grad, so that backward would need weights that are gone by then.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise OffloadError(
                f"{name} is streamed, and its input requires grad: its weights are gone by the time of backward",
                "run the forward under torch.inference_mode() or torch.no_grad(); offloading is for inference",
            )
    elif isinstance(value, Mapping):
        for item in value.values():
            refuse_grad(name, item)
    elif isinstance(value, tuple | list):
        for item in value:
            refuse_grad(name, item)


def watched(stream: Stream, index: int, last: bool, unit: Unit, observer: Observer, forward: Forward) -> Forward:
    """The forward of a scope while forwards are observed.

    Args:
        index: its step; -1 where the unit is resident.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with stream.lock:
            if index >= 0:
                if torch.is_grad_enabled():
                    refuse_grad(unit.name, (args, kwargs))
                observer.reach(unit, lambda: stream.enter(index))
            else:
                observer.reach(unit, _nothing)
            observer.push(unit.name, unit.scope)
            try:
                output = forward(*args, **kwargs)
                if index >= 0:
                    kept = outliving(output, stream.ring.holds)
                    if kept is not output:
                        observer.outliving.add(unit)
                    output = kept
            finally:
                observer.pop()
                if index >= 0:
                    if torch.is_grad_enabled():
                        stream.outdate(index)
                    stream.leave(index, last)
            return output

    return run


def framed(
    lock: threading.RLock,
    observer: Observer,
    name: str,
    module: nn.Module,
    forward: Forward,
) -> Forward:
    """The forward of a module that is no scope, while who reads what is being found out."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            observer.push(name, module)
            try:
                return forward(*args, **kwargs)
            finally:
                observer.pop()

    return run


def rooted(
    lock: threading.RLock,
    begin: Callable[[], None],
    end: Callable[[], None],
    done: Callable[[], None],
    forward: Forward,
) -> Forward:
    """The forward of the whole model. One thread at a time: the places on the device are everybody's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiling_an_offloaded_model_is_not_built_yet()
        with lock:
            begin()
            try:
                output = forward(*args, **kwargs)
            finally:
                end()
            done()
            return output

    return run


def compiling_an_offloaded_model_is_not_built_yet() -> NoReturn:
    """Named so that the error of torch with `fullgraph=True`, which shows no more than the name, says it too.

    Raises:
        NotBuiltError: always.
    """
    raise NotBuiltError(f"torch.compile of an offloaded model is not built yet in ftd {__version__}", "run it eagerly")


# what torch.compiler.disable sets, without the second that importing the compiler takes
compiling_an_offloaded_model_is_not_built_yet._torchdynamo_disable = True  # type: ignore[attr-defined]


def _nothing() -> None:
    """A resident unit is waited for by nobody."""
