"""The forward of a streamed model: what happens when a block is reached, and when it is done.

Reaching a block makes compute wait for its copy and puts its parameters in their modules; leaving it parks them again
and submits the copies for which its place was the last obstacle. All else follows from two rules:

- A block's parameters are in their modules only between `enter` and the end of its turn, and its bytes are not
  overwritten in between: copies are submitted at the end of turns only, and each runs after everything computed so far.
- A copy marks the blocks whose bytes it overwrites as gone. A block that is gone when it is reached is *missed*: it is
  loaded at once into memory of its own, whatever order the model took to get there.

So the plan decides only how fast a forward is, never whether it is right.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from ftd_client.stream.link import Copy, Link, Ticket
from ftd_client.stream.memory import Memory
from ftd_client.stream.parked import Parked
from ftd_client.stream.units import OffloadError, Param

#: `torch.autograd.graph.increment_version` of a list, which asks first whether it is one.
_raise_version = torch._C._increment_version
_view = operator.attrgetter("view")


class Binding:
    """One place of one parameter: what stands in the module's registry while its block is on the device, and else.

    Attributes:
        version: of `view`, that it is expected to have.
    """

    __slots__ = ("attribute", "param", "parked", "registry", "version", "view")

    def __init__(
        self,
        registry: dict[str, torch.Tensor | None],
        attribute: str,
        view: torch.Tensor,
        parked: Parked,
        param: Param,
    ) -> None:
        self.registry = registry
        self.attribute = attribute
        self.view = view
        self.parked = parked
        self.version = view._version
        self.param = param

    def of(self, view: torch.Tensor) -> Binding:
        """The same place for another tensor."""
        return Binding(self.registry, self.attribute, view, self.parked, self.param)


class Step:
    """A streamed block as the runtime handles it; steps are numbered in the order of execution.

    Attributes:
        copies: that fill its place.
        due: steps whose copies are submitted when its turn ends.
        evicts: steps that lose bytes when it is copied.
        ticket: of its copy; None while its bytes are not there.
    """

    __slots__ = ("bindings", "copies", "due", "evicts", "name", "ticket")

    def __init__(
        self,
        name: str,
        copies: tuple[Copy, ...],
        bindings: tuple[Binding, ...],
        due: tuple[int, ...],
        evicts: tuple[int, ...],
    ) -> None:
        self.name = name
        self.copies = copies
        self.bindings = bindings
        self.due = due
        self.evicts = evicts
        self.ticket: Ticket | None = None


class Stream:
    """Runs one plan. Every method is called with `lock` held, which a forward of a block holds to its end.

    Args:
        lock: of the offloaded model, reentrant.
        steps: those that the plan streams, in the order of execution; behind them those that it knows nothing of, which
            are loaded whenever they are reached.
        planned: how many the plan streams.
        ahead: steps whose copies the first forward finds submitted, in order.
        ring: what the steps' views lie in.
        load: tensors of parameters in fresh device memory, on demand.
    """

    def __init__(
        self,
        lock: threading.RLock,
        steps: Sequence[Step],
        planned: int,
        ahead: Sequence[int],
        link: Link,
        ring: Memory,
        load: Callable[[Sequence[Param]], list[torch.Tensor]],
    ) -> None:
        self.lock = lock
        self.steps = tuple(steps)
        self.ring = ring
        self._planned = planned
        self._link = link
        self._load = load
        self._bound = -1  # the step whose turn it is
        self._bindings: Sequence[Binding] = ()  # its own, or of a missed one those in memory of their own
        self._in_place = False  # its parameters are in their modules: while a scope of it runs
        self._depth = 0  # forwards of scopes that run now
        self.forwards = 0  # forwards of the whole model that run now
        self._next = 0  # the first step whose due copies have not been submitted in this forward
        self._replaying = False  # the turn is of a step before `_next`, whose due copies have been
        self._strays: list[tuple[int, Sequence[Binding]]] = []  # steps entered inside of another's forward
        self.thread = 0  # that runs a scope now
        self.missed: dict[int, int] = {}  # step → the one that was expected when it was missed first
        for step in ahead:
            self._submit(step)

    def enter(self, index: int) -> None:
        """A scope of this step is about to run."""
        if self._depth:
            self._enter_inside(index)
        elif index != self._bound:
            if self._bound >= 0:
                self._end_turn()
            if index != self._next:
                self._jump(index)
            step = self.steps[index]
            if step.ticket is None:
                bindings: Sequence[Binding] = self._miss(index)
            else:
                bindings = step.bindings
                try:
                    self._link.wait(step.ticket)
                except BaseException:
                    step.ticket = None  # a copy that failed is made again when the step is reached again
                    raise
            _bind(bindings)
            self._bound, self._bindings, self._in_place = index, bindings, True
        elif not self._in_place:
            _bind(self._bindings)
            self._in_place = True
        self._depth += 1

    def leave(self, index: int, last: bool) -> None:
        """A scope of this step has run; `last` where the plan knows of no other one in the step."""
        self._depth -= 1
        if self._strays and self._strays[-1][0] == index:
            _park(self._strays.pop()[1])
        elif not self._depth:
            if last:
                self._end_turn()
            else:
                # the turn goes on, for the step's other scopes; nobody else is to find its parameters meanwhile
                self._in_place = False
                _park(self._bindings)

    def begin(self) -> None:
        """The whole model's forward is about to run."""
        if not (self.forwards or self._depth):
            self._complete()
        self.forwards += 1

    def end(self) -> None:
        """The whole model's forward has run: copies for the next one are submitted."""
        self.forwards -= 1
        if not (self.forwards or self._depth):
            self._complete()

    @property
    def busy(self) -> bool:
        """Whether a forward of the model, or of a scope, runs now."""
        return bool(self.forwards or self._depth)

    def references(self, index: int) -> int:
        """How many hold the ring's storage, or a parameter of this step: more after a forward than before it means
        that one was kept."""
        held: int = torch._C._storage_Use_Count(self.ring.storage)
        bindings = self._bindings if index == self._bound else self.steps[index].bindings
        return held + sum(sys.getrefcount(binding.view) for binding in bindings)

    def abandon(self) -> None:
        """Forgets forwards that will never end: those of a thread that a fork left behind."""
        self.forwards = self._depth = self.thread = 0

    def join(self) -> None:
        """Makes compute wait for every copy that was submitted."""
        for step in self.steps:
            if step.ticket is not None:
                self._link.wait(step.ticket)

    def close(self) -> None:
        """Parks everything; nothing may be entered any more. Copies may still run: the link is drained before the ring
        is freed."""
        while self._strays:
            _park(self._strays.pop()[1])
        bindings, in_place = self._bindings, self._in_place
        self.steps, self._bound, self._bindings, self._in_place = (), -1, (), False
        if in_place:
            _park(bindings)

    def _end_turn(self) -> None:
        index, bindings, in_place, replaying = self._bound, self._bindings, self._in_place, self._replaying
        self._bound, self._bindings, self._in_place, self._replaying = -1, (), False, False
        try:
            if in_place:
                _park(bindings)
        finally:
            if not replaying:
                self._next = index + 1
                for due in self.steps[index].due:
                    self._submit(due)

    def _submit(self, index: int) -> None:
        steps = self.steps
        step = steps[index]
        if step.ticket is None:
            for evicted in step.evicts:
                steps[evicted].ticket = None
            step.ticket = self._link.submit(step.copies)

    def _jump(self, index: int) -> None:
        """Reached out of order. Ahead: the steps between are passed over. Behind, or not planned: the order stands
        still for it; but the first step, outside of a forward of the whole model, begins a new round of calls."""
        if index == 0 and not self.forwards:
            self._complete()
        elif self._next < index < self._planned:
            self._pass_over(index)
        else:
            self._replaying = True

    def _pass_over(self, until: int) -> None:
        for passed in range(self._next, until):
            for due in self.steps[passed].due:
                self._submit(due)
        self._next = until

    def _complete(self) -> None:
        if self._bound >= 0:
            self._end_turn()
        if self._next:
            self._pass_over(self._planned)
            self._next = 0

    def _enter_inside(self, index: int) -> None:
        """Called by another scope's forward: loaded beside it, since that one's bytes must stay."""
        if (index == self._bound and self._in_place) or any(index == stray for stray, _ in self._strays):
            return
        bindings = self._miss(index)
        _bind(bindings)
        self._strays.append((index, bindings))

    def _miss(self, index: int) -> list[Binding]:
        step = self.steps[index]
        self.missed.setdefault(index, self._next)
        params = list(dict.fromkeys(binding.param for binding in step.bindings))
        loaded = dict(zip(params, self._load(params), strict=True))
        return [binding.of(loaded[binding.param]) for binding in step.bindings]


def _bind(bindings: Sequence[Binding]) -> None:
    for b in bindings:
        registry, attribute, view = b.registry, b.attribute, b.view
        if registry.get(attribute) is not b.parked or view._version != b.version:
            _take_out(bindings)
            _refuse(bindings)
        registry[attribute] = view


def _park(bindings: Sequence[Binding]) -> None:
    """
    Raises:
        OffloadError: a parameter was replaced or changed while it was in place; the others are parked.
    """
    try:
        if not _take_out(bindings):
            _refuse(bindings)
    finally:
        # what backward saved of them, it refuses: their bytes are others' by then
        _raise_version(list(map(_view, bindings)))
        for b in bindings:
            b.version = b.view._version


def _take_out(bindings: Sequence[Binding]) -> bool:
    """Puts the stand-ins in place; False where something else than the view was found, or it was changed."""
    fine = True
    for b in bindings:
        registry, attribute, view = b.registry, b.attribute, b.view
        found = registry.get(attribute)
        if found is view:
            registry[attribute] = b.parked
        elif found is not b.parked:
            fine = False
        if view._version != b.version:
            fine = False
    return fine


def _refuse(bindings: Sequence[Binding]) -> NoReturn:
    for b in bindings:
        found = b.registry.get(b.attribute)
        if found is not b.parked and found is not b.view:
            raise OffloadError(
                f"{b.param.name} was replaced after it was offloaded: a {type(found).__name__} found where its "
                "stand-in was left",
                "call release() before parameters are replaced, and offload again",
            )
        if b.view._version != b.version:
            raise OffloadError(
                f"{b.param.name} was changed in place while it was on the device, where the change does not last",
                "call release() before weights are changed, or name it in exclude_patterns",
            )
    raise OffloadError("a parameter was replaced or changed after it was offloaded", "call release() first")
