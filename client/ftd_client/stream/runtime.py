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

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ftd_client.stream.link import Copy, Link, Ticket
from ftd_client.stream.memory import Memory
from ftd_client.stream.parked import Parked
from ftd_client.stream.units import OffloadError, Param


class Binding(NamedTuple):
    """One place of one parameter: what stands in the module's registry while its block is on the device, and else."""

    registry: dict[str, torch.Tensor | None]
    attribute: str
    view: torch.Tensor
    parked: Parked
    version: int
    param: Param


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
        self._depth = 0  # forwards of scopes that run now
        self._forwards = 0  # forwards of the whole model that run now
        self._next = 0  # the first step whose due copies have not been submitted in this forward
        self._replaying = False  # the turn is of a step before `_next`, whose due copies have been
        self._strays: list[tuple[int, Sequence[Binding]]] = []  # steps entered inside of another's forward
        self._fresh: Sequence[Binding] | None = None  # bindings of a missed step, in memory of their own
        self.missed: list[tuple[int, int]] = []  # (step, the step that was expected)
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
            fresh = None
            if step.ticket is None:
                fresh = self._miss(index)
            else:
                self._link.wait(step.ticket)
            _bind(fresh or step.bindings)
            self._bound, self._fresh = index, fresh
        self._depth += 1

    def leave(self, index: int, last: bool) -> None:
        """A scope of this step has run; `last` where the plan knows of no other one in the step."""
        self._depth -= 1
        if self._strays and self._strays[-1][0] == index:
            _park(self._strays.pop()[1])
        elif last and not self._depth:
            self._end_turn()

    def begin(self) -> None:
        """The whole model's forward is about to run."""
        if not (self._forwards or self._depth):
            self._complete()
        self._forwards += 1

    def end(self) -> None:
        """The whole model's forward has run: copies for the next one are submitted."""
        self._forwards -= 1
        if not (self._forwards or self._depth):
            self._complete()

    @property
    def busy(self) -> bool:
        """Whether a forward of the model, or of a scope, runs now."""
        return bool(self._forwards or self._depth)

    def abandon(self) -> None:
        """Forgets forwards that will never end: those of a thread that a fork left behind."""
        self._forwards = self._depth = 0

    def outdate(self, index: int) -> None:
        """Makes backward refuse what it saved of this step's parameters: their bytes are overwritten by then."""
        step = self.steps[index]
        step.bindings = tuple(_outdated(binding) for binding in step.bindings)

    def join(self) -> None:
        """Makes compute wait for every copy that was submitted."""
        for step in self.steps:
            if step.ticket is not None:
                self._link.wait(step.ticket)

    def close(self) -> None:
        """Parks everything. Copies may still run: the link is drained before the ring is freed."""
        while self._strays:
            _park(self._strays.pop()[1])
        if self._bound >= 0:
            _park(self._fresh or self.steps[self._bound].bindings)
        self._bound, self._fresh = -1, None
        self.steps = ()

    def _end_turn(self) -> None:
        step = self.steps[self._bound]
        bindings, self._fresh = self._fresh or step.bindings, None
        replaying, self._replaying = self._replaying, False
        index, self._bound = self._bound, -1
        _park(bindings)
        if not replaying:
            self._next = index + 1
            for due in step.due:
                self._submit(due)

    def _submit(self, index: int) -> None:
        step = self.steps[index]
        if step.ticket is None:
            for evicted in step.evicts:
                self.steps[evicted].ticket = None
            step.ticket = self._link.submit(step.copies)

    def _jump(self, index: int) -> None:
        """Reached out of order. Ahead: the steps between are passed over. Behind, or not planned: the order stands
        still for it; but the first step, outside of a forward of the whole model, begins a new round of calls."""
        if index == 0 and not self._forwards:
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
        if index == self._bound or any(index == stray for stray, _ in self._strays):
            return
        bindings = self._miss(index)
        _bind(bindings)
        self._strays.append((index, bindings))

    def _miss(self, index: int) -> list[Binding]:
        step = self.steps[index]
        self.missed.append((index, self._next))
        params = list(dict.fromkeys(binding.param for binding in step.bindings))
        loaded = dict(zip(params, self._load(params), strict=True))
        return [b._replace(view=loaded[b.param], version=loaded[b.param]._version) for b in step.bindings]


def _outdated(binding: Binding) -> Binding:
    torch.autograd.graph.increment_version(binding.view)
    return binding._replace(version=binding.view._version)


def _bind(bindings: Sequence[Binding]) -> None:
    for registry, attribute, view, parked, version, _ in bindings:
        if registry.get(attribute) is not parked or view._version != version:
            _park(bindings, check=False)
            _refuse(bindings)
        registry[attribute] = view


def _park(bindings: Sequence[Binding], *, check: bool = True) -> None:
    replaced = False
    for registry, attribute, view, parked, _, _ in bindings:
        found = registry.get(attribute)
        if found is view:
            registry[attribute] = parked
        elif found is not parked:
            replaced = True
    if replaced and check:
        _refuse(bindings)


def _refuse(bindings: Sequence[Binding]) -> NoReturn:
    for registry, attribute, view, parked, version, param in bindings:
        found = registry.get(attribute)
        if found is not parked and found is not view:
            raise OffloadError(
                f"{param.name} was replaced after it was offloaded: a {type(found).__name__} found where its "
                "stand-in was left",
                "call release() before parameters are replaced, and offload again",
            )
        if view._version != version:
            raise OffloadError(
                f"{param.name} was changed in place while it was on the device, where the change does not last",
                "call release() before weights are changed, or name it in exclude_patterns",
            )
    raise OffloadError("a parameter was replaced or changed after it was offloaded", "call release() first")
