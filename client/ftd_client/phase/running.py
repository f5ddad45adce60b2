"""A plan at work in a model: the hooks that drive it, and who watches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
from torch import nn

from ftd_client.phase.budget import Activations
from ftd_client.phase.clock import clock_of
from ftd_client.phase.kept import Kept
from ftd_client.phase.observe import Observer
from ftd_client.stream.hooks import Forward, Hooks, framed, rooted, streamed, watched
from ftd_client.stream.installed import Installed
from ftd_client.stream.link import Link
from ftd_client.stream.loader import Loader
from ftd_client.stream.loose import Loose
from ftd_client.stream.parked import Parked
from ftd_client.stream.residents import swap
from ftd_client.stream.units import OffloadError, Param, Unit

#: How parameters reach compute: put in place before a forward, or fetched when something reaches for them (by
#: attribute, or by what is done with the stand-in).
Access = Literal["view", "getter", "torch_function"]


class Running:
    """Drives what is installed, until `close`.

    Args:
        units: all of the model's.
        lock: of what is at work.
        turn: held by a forward of the whole model to its end, and by whatever must not happen inside of one.
        check: called before each forward of the whole model.
        done: called after each one that raised nothing.

    Attributes:
        activations: of the forwards that were watched.
        kept: asked where none is watched.
    """

    def __init__(
        self,
        model: nn.Module,
        installed: Installed,
        units: Sequence[Unit],
        loader: Loader,
        link: Link,
        lock: threading.RLock,
        turn: threading.RLock,
        check: Callable[[], None],
        done: Callable[[], object],
    ) -> None:
        self._model = model
        self.installed = installed
        self._owner = {param: unit for unit in units for param in unit.params}
        self._loader = loader
        self._link = link
        self._lock = lock
        self._check = check
        self._done = done
        self.activations = Activations(link.device)
        self.kept = Kept(model, installed)
        self._hooked = ExitStack()
        self._turn = turn
        self._live = True
        self._regions: dict[str, Unit] = {unit.name: unit for unit in units if unit.is_region}
        self._loose: Loose | None = None
        self.observer: Observer | None = None

    def hook(self, access: Access, *, frames: bool, times: bool) -> None:
        """Puts hooks in place of those from before; the plan and its memory stay.

        Args:
            frames: watch who reads what, and in which order.
            times: watch how long compute takes.
        """
        self._hooked.close()
        hooks = Hooks()
        self._hooked.callback(hooks.close)
        installed = self.installed
        self.observer = Observer(clock_of(self._link.device) if times else None) if frames or times else None
        self._loose = None
        if access == "view":
            scopes = self._hook_streamed(hooks)
        else:
            scopes = set()
            blocks = [[param for unit in block for param in unit.params] for block in installed.streamed]
            self._loose = Loose(blocks, installed.plan.ring_bytes, self._link, self._loader.submit)
            self._hooked.callback(self._loose.close)
            if access == "getter":
                hooks.getters(unit.scope for block in installed.streamed for unit in block)
        if self.observer is not None:
            for unit in installed.resident:
                if unit.scope is not None and unit.scope not in scopes:
                    scopes.add(unit.scope)
                    hooks.patch(unit.scope, partial(watched, installed.stream, -1, False, unit, self.observer))
        if self.observer is not None and frames:
            for path, module in self._model.named_modules():
                if module not in scopes and module is not self._model and callable(getattr(module, "forward", None)):
                    hooks.patch(module, partial(framed, self.observer, path, module))
        hooks.patch(self._model, self._root)

    def close(self) -> None:
        """Takes the hooks out, and gives the memory back of what streams.

        Raises:
            OffloadError: as `Installed.close` and `Kept.check`, after everything is given back.
        """
        try:
            if self.observer is None and not self.kept.told:
                self.kept.check()
        finally:
            self._live = False
            self._hooked.close()
            self.observer = self._loose = None
            self.installed.close()

    def demand(self, param: Param) -> torch.Tensor:
        """A parameter for somebody who reached for it where it is parked."""
        with self._lock:
            observer, loose = self.observer, self._loose
            if loose is not None:
                unit = self._owner[param]
                if observer is not None and not (observer.visits and observer.visits[-1].unit is unit):
                    observer.reach(unit, partial(loose.prepare, param))
                tensor = loose.fetch(param)
                if tensor is not None:
                    return tensor
            elif observer is not None:
                observer.read(param)
            held = self.installed.residents.tensor_of(param)
            return held if held is not None else self._loader.lend([param])[0]

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """A block marked by hand. What it reads outside of any module is put in place for its duration, in memory of
        its own: code may take views of it along. No lock is held inside: generators stop there."""
        observer = self.observer
        placed = self._place(self._regions[name]) if name in self._regions else []
        if observer is not None:
            observer.push(name, None)
        try:
            yield
        finally:
            if observer is not None:
                observer.pop()
            with self._lock:
                fine = [swap(param, tensor, parked) for param, tensor, parked in placed]
            if not all(fine):
                raise OffloadError(
                    f"parameters were replaced inside of offload_block({name!r})", "call release() first"
                )

    def _place(self, unit: Unit) -> list[tuple[Param, torch.Tensor, Parked]]:
        with self._lock:
            parked = self.installed.parked
            free = [
                param
                for param in unit.params
                if all(isinstance(b.module._parameters.get(b.attribute), Parked) for b in param.group.places)
            ]
            placed = [(p, tensor, parked[p]) for p, tensor in zip(free, self._loader.lend(free), strict=True)]
            for param, tensor, stand_in in placed:
                swap(param, stand_in, tensor)
            return placed

    def refuse_inside(self, what: str) -> None:
        """
        Raises:
            OffloadError: a forward runs now.
        """
        if self.installed.stream.busy:
            raise OffloadError(f"{what} was called from inside of a forward of the model", "call it after the forward")

    def _hook_streamed(self, hooks: Hooks) -> set[nn.Module]:
        stream, observer = self.installed.stream, self.observer
        scopes: set[nn.Module] = set()
        for index, block in enumerate(self.installed.streamed):
            for unit in block:
                last = unit is block[-1]
                if unit.scope is None:
                    continue
                scopes.add(unit.scope)
                if observer is None:
                    hooks.patch(unit.scope, partial(streamed, stream, index, last, unit.scope))
                else:
                    hooks.patch(unit.scope, partial(watched, stream, index, last, unit, observer))
        return scopes

    def _root(self, forward: Forward) -> Forward:
        return rooted(self._turn, self._model, lambda: self._live, self._begin, self._end, self._finished, forward)

    def _begin(self) -> None:
        with self._lock:
            self._check()
            self.installed.residents.check()
            self.installed.stream.begin()
            if self.observer is not None and self.installed.stream.forwards == 1:
                self.activations.begin()
                self.observer.begin()

    def _end(self) -> None:
        with self._lock:
            self.installed.stream.end()
            if self.observer is not None and not self.installed.stream.forwards:
                self.observer.finish()
                self.activations.finish()

    def _finished(self) -> None:
        # one inside of another, or of a block that was called directly, ends nothing
        if not self.installed.stream.busy:
            with self._lock:
                self._loader.lent.check()
            self._done()
