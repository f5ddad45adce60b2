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
from ftd_client.stream.memory import Memory
from ftd_client.stream.outputs import outliving
from ftd_client.stream.parked import Parked
from ftd_client.stream.runtime import Stream
from ftd_client.stream.units import OffloadError, Unit
from ftd_client.stream.waits import give_way

_log = logging.getLogger("ftd")

#: What is being traced by TorchScript in this thread; None where nothing is.
_tracing: Callable[[], object | None] = torch._C._get_tracing_state

Forward = Callable[..., Any]
#: What `Module._apply` does with each tensor.
Conversion = Callable[[torch.Tensor], torch.Tensor]


class Uncopied:
    """Refuses `copy.deepcopy` and pickle: what lies in a module's attributes would be taken along, and hooks of a copy
    would run the original's weights."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OffloadError(
            "a module of an offloaded model was about to be copied or pickled with its hooks",
            "call release() first, or save its state_dict()",
        )


class _Patch(Uncopied, functools.partial[Any]):
    """Stands in place of a module's forward; a partial calls what it holds without a frame of its own. Its signature
    is that of the original."""

    @staticmethod
    def of(original: Forward, run: Forward) -> _Patch:
        patch = _Patch(run)
        functools.update_wrapper(patch, original)
        return patch

    def pass_on(self, original: Forward) -> None:
        """From now on it is the original."""
        self.__setstate__((original, (), {}, vars(self)))  # type: ignore[attr-defined]

    @property
    def _torchscript_modifier(self) -> NoReturn:
        # what TorchScript asks of a forward first, and nobody else asks
        _refuse_torchscript()


class _Apply(Uncopied):
    """Stands in place of a module's `_apply`, through which torch converts and moves its tensors."""

    def __init__(
        self, module: nn.Module, refuse: Callable[[nn.Module, Conversion], None], running: list[Conversion]
    ) -> None:
        self._module = module
        self._original: Callable[..., Any] = module._apply
        self._refuse_conversion = refuse
        self._running = running

    def __call__(self, convert: Conversion, *args: Any, **kwargs: Any) -> Any:
        running = self._running
        if convert in running:  # of a module above, which asked for this one too
            return self._original(convert, *args, **kwargs)
        self._refuse_conversion(self._module, convert)
        running.append(convert)
        try:
            return self._original(convert, *args, **kwargs)
        finally:
            running.remove(convert)


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
        patch = _Patch.of(original, wrap(original))

        def undo() -> None:
            patch.pass_on(original)
            if attributes.get("forward") is not patch:
                # somebody wrapped it again: theirs stays, and this one passes calls on
                _log.warning(
                    "%s.forward was patched after it was offloaded: that patch stays", type(module).__qualname__
                )
            elif own:
                attributes["forward"] = original
            else:
                del attributes["forward"]

        attributes["forward"] = patch
        self._undo.append(undo)

    def guard(self, model: nn.Module) -> None:
        """Keeps the model and its modules from being copied or offloaded by somebody else while it is offloaded."""
        for module in model.modules():
            attributes = module.__dict__
            attributes[_GUARD] = Uncopied()
            self._undo.append(functools.partial(attributes.pop, _GUARD, None))

    def conversions(self, model: nn.Module, refuse: Callable[[nn.Module, Conversion], None]) -> None:
        """Asks `refuse` before a module of the model, with all below it, is converted or moved (`half`, `to`, …)."""
        running: list[Conversion] = []
        for module in model.modules():
            attributes = module.__dict__
            if "_apply" not in attributes:
                attributes["_apply"] = _Apply(module, refuse, running)
                self._undo.append(functools.partial(attributes.pop, "_apply", None))

    def getters(self, modules: Iterable[nn.Module | None]) -> None:
        """Makes attribute access of parameters in these modules, and below them, fetch what is parked."""
        found = {module for top in modules if top is not None for module in top.modules()}
        for module in found:
            plain = module._parameters
            module.__dict__["_parameters"] = _Getters(plain)
            self._undo.append(functools.partial(_take_back, module, plain))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class _Getters(dict[str, torch.Tensor | None]):
    """A module's parameters, of which `module.name` gets those that are parked from where they are fetched.

    `nn.Module.__getattr__` looks names up here; listings (`parameters()`, `state_dict()`) see the stand-ins.
    """

    def __getitem__(self, name: str) -> torch.Tensor | None:
        value = super().__getitem__(name)
        return value.ftd_access.fetch() if isinstance(value, Parked) else value


def _take_back(module: nn.Module, plain: dict[str, Any]) -> None:
    """Puts a module's own registry back, with what was registered, replaced or deleted meanwhile."""
    now = dict(module._parameters.items())
    plain.clear()
    plain.update(now)
    module.__dict__["_parameters"] = plain


_GUARD = "_ftd_guard"


def is_offloaded(model: nn.Module) -> bool:
    """Whether some module of the model belongs to an offloaded one."""
    return any(_GUARD in vars(module) for module in model.modules())


def streamed(stream: Stream, index: int, last: bool, module: nn.Module, forward: Forward) -> Forward:
    """The forward of a scope of step `index`. The hot path: it runs for every unit of every forward."""
    name, lock, enter, leave, ring = stream.steps[index].name, stream.lock, stream.enter, stream.leave, stream.ring
    low, high = ring.address, ring.address + ring.nbytes
    grad, tensor, strided, thread = torch.is_grad_enabled, torch.Tensor, torch.strided, threading.get_ident
    compiling = torch.compiler.is_compiling

    def run(*args: Any, **kwargs: Any) -> Any:
        if compiling() or _tracing() is not None:
            refuse_recording()
        me = thread()
        if stream.thread != me and stream.thread:
            give_way(stream, name)
        with lock:
            if not stream.steps:  # taken out while this thread waited
                return module.forward(*args, **kwargs)
            if grad():
                refuse_grad(name, (args, kwargs))
            enter(index)
            before, stream.thread = stream.thread, me
            try:
                output = forward(*args, **kwargs)
                try:
                    fine = type(output) is tensor and output.layout is strided and not low <= output.data_ptr() < high
                except RuntimeError:  # as in `Memory.holds`
                    fine = True
                if not fine:
                    output = outliving(output, ring.holds)
            finally:
                stream.thread = before
                leave(index, last)
            return output

    return run


def refuse_grad(name: str, value: Any) -> None:
    """Looks for tensors in containers of Python; what hides one elsewhere is refused by
    backward, since parking raises the version of views.

    Raises:
        OffloadError: an input requires grad, so that backward would need weights that are gone by then.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            _refuse_backward(name, "input")
    elif isinstance(value, Mapping):
        for item in value.values():
            refuse_grad(name, item)
    elif isinstance(value, tuple | list):
        for item in value:
            refuse_grad(name, item)


def _refuse_backward(name: str, what: str) -> NoReturn:
    raise OffloadError(
        f"{name} is streamed, and its {what} requires grad: its weights are gone by the time of backward",
        "run the forward under torch.inference_mode() or torch.no_grad(); offloading is for inference",
    )


def watched(stream: Stream, index: int, last: bool, unit: Unit, observer: Observer, forward: Forward) -> Forward:
    """The forward of a scope while forwards are observed.

    Args:
        index: its step; -1 where the unit is resident.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        give_way(stream, unit.name)
        with stream.lock:
            if index >= 0 and not stream.steps:
                assert unit.scope is not None
                return unit.scope.forward(*args, **kwargs)
            if index >= 0:
                if torch.is_grad_enabled():
                    refuse_grad(unit.name, (args, kwargs))
                observer.reach(unit, lambda: stream.enter(index))
            else:
                observer.reach(unit, _nothing)
            observer.push(unit.name, unit.scope)
            references = stream.references(index) if index >= 0 else 0
            before, stream.thread = stream.thread, threading.get_ident()
            try:
                output = forward(*args, **kwargs)
                if index >= 0:
                    found = _Found(stream.ring)
                    output = outliving(output, found)
                    if found.ours:
                        observer.outliving.add(unit)
                    if stream.references(index) > references:
                        if found.grad:  # by an input that `refuse_grad` does not find; a graph holds weights
                            _refuse_backward(unit.name, "output")
                        refuse_kept(unit.name)
            finally:
                stream.thread = before
                observer.pop()
                if index >= 0:
                    stream.leave(index, last)
            return output

    return run


class _Found:
    """Asked for each tensor of an output whether it lies in the ring.

    Attributes:
        ours: one did.
        grad: one requires grad.
    """

    def __init__(self, ring: Memory) -> None:
        self._ring = ring
        self.ours = self.grad = False

    def __call__(self, tensor: torch.Tensor) -> bool:
        ours = self._ring.holds(tensor)
        self.ours, self.grad = self.ours or ours, self.grad or tensor.requires_grad
        return ours


def refuse_kept(name: str) -> NoReturn:
    """
    Raises:
        OffloadError: always.
    """
    raise OffloadError(
        f"after the forward of {name} something holds its weights, or views of them, which will show others' bytes",
        "name it in exclude_patterns",
    )


def framed(
    observer: Observer,
    name: str,
    module: nn.Module,
    forward: Forward,
) -> Forward:
    """The forward of a module that is no scope, while who reads what is being found out."""

    def run(*args: Any, **kwargs: Any) -> Any:
        observer.push(name, module)
        try:
            return forward(*args, **kwargs)
        finally:
            observer.pop()

    return run


def rooted(
    turn: threading.RLock,
    module: nn.Module,
    live: Callable[[], bool],
    begin: Callable[[], None],
    end: Callable[[], None],
    done: Callable[[], None],
    forward: Forward,
) -> Forward:
    """The forward of the whole model, of one thread at a time.

    Args:
        turn: held throughout. Not the lock of the stream, which threads that the forward starts need.
        module: the whole model.
        live: whether these hooks are still in place.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_recording()
        _refuse_derivatives()
        with turn:
            if not live():  # taken out while this thread waited
                return module.forward(*args, **kwargs)
            begin()
            try:
                output = forward(*args, **kwargs)
            finally:
                end()
            done()
            return output

    return run


def _refuse_derivatives() -> None:
    """
    Raises:
        OffloadError: `torch.func` differentiates this call: memory that is taken inside would be its, not the plan's.
    """
    transforms = [level.key().name.lower() for level in torch._C._functorch.get_interpreter_stack() or ()]
    if set(transforms) - {"vmap"}:
        raise OffloadError(
            f"torch.func transforms the offloaded model by {', '.join(transforms)}: expected vmap alone",
            "call release() before the model is differentiated; offloading is for inference",
        )


def refuse_recording() -> None:
    """
    Raises:
        NotBuiltError: this call is being compiled or traced, and would be run again later with other weights in place.
    """
    if torch.compiler.is_compiling():
        compiling_an_offloaded_model_is_not_built_yet()
    if _tracing() is not None:
        _refuse_torchscript()


def _refuse_torchscript() -> NoReturn:
    raise NotBuiltError(
        "torch.jit.trace and torch.jit.script would keep the places of weights, not the weights", "call release() first"
    )


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
