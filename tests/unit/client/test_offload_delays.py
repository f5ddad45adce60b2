"""Copies that come late, one of them late, out of order, or not at all: the outputs are the resident model's."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client.stream.cpu_link import CpuLink, Job, Jobs, move
from ftd_client.stream.link import Copy, LinkError
from tests.streamed_blocks import Block, D, Stack

from .offloading import NAME, beside, config, equal, offloaded, released, run, stack, to_inference, use_link, x

pytestmark = pytest.mark.usefixtures(released.__name__)
BOUND_S = 20
MODES = ["view", "getter", "torch_function"]
CopyFn = Callable[[Sequence[Copy]], None]


class Late:
    """Copies that take `seconds`, of which `which` says by number whether it is one of them."""

    def __init__(self, seconds: float, which: Callable[[int], bool] = lambda number: True) -> None:
        self.seconds, self.which = seconds, which
        self.count = 0
        self.waiting = threading.Event()

    def __call__(self, copies: Sequence[Copy]) -> None:
        self.count += 1
        if self.which(self.count):
            self.waiting.wait(self.seconds)  # set by nobody: a sleep that gives way
        move(copies)


def by_chance(seed: int) -> Callable[[int], bool]:
    chance = random.Random(seed)
    return lambda number: chance.random() < 0.3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "late",
    [
        lambda: Late(0.002),
        lambda: Late(0.05, lambda number: number == 20),
        lambda: Late(0.004, by_chance(0)),
    ],
    ids=["every copy", "one copy", "by chance"],
)
def test_late_copies_are_waited_for(late: Callable[[], Late], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = late()
    use_link(monkeypatch, lambda: CpuLink(slow))
    model = stack(count=3)
    manager, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(8):
        assert equal(model, resident)
    assert manager.phase == "inference"
    assert slow.count > 20


def overlap(one: Job, other: Job) -> bool:
    return any(
        a.dst < b.dst + b.nbytes and b.dst < a.dst + a.nbytes for a in one.copies for b in other.copies
    )  # fmt: skip


def shuffled(chance: random.Random) -> Callable[[Jobs], Iterable[Job]]:
    """Jobs in any order that keeps that of places which overlap: those of a device with several copy engines."""

    def order(jobs: Jobs) -> Iterable[Job]:
        waiting: list[Job] = []
        ended = False
        while not ended or waiting:
            while not ended and (not waiting or (len(waiting) < 4 and not jobs.empty())):
                job = jobs.get()
                ended = job is None
                if job is not None:
                    waiting.append(job)
            free = [
                job for at, job in enumerate(waiting) if not any(overlap(job, before) for before in waiting[:at])
            ]  # fmt: skip
            if free:
                job = chance.choice(free)
                waiting.remove(job)
                yield job

    return order


@pytest.mark.parametrize("seed", range(3))
def test_copies_out_of_order_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_link(monkeypatch, lambda: CpuLink(Late(0.0003), shuffled(random.Random(seed))))
    model = stack(count=4)
    manager, resident = beside(model, num_blocks=3, min_blocks=2)
    for _ in range(6):
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_a_place_is_not_filled_before_compute_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow compute, fast copies: OF-01's other side."""
    copied = threading.Event()

    def fast(copies: Sequence[Copy]) -> None:
        move(copies)
        copied.set()

    class Slow(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copied.wait(0.01)
            copied.clear()
            return super().forward(x)

    use_link(monkeypatch, lambda: CpuLink(fast))
    model = stack(*(Slow() for _ in range(5)))
    manager, resident = beside(model)
    for _ in range(6):
        assert equal(model, resident)
    assert manager.phase == "inference"


class Failing:
    """Copies as told: `fails` says by number which one cannot be made."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, copies: Sequence[Copy]) -> None:
        if self.fails:
            raise OSError(5, "Input/output error")
        move(copies)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forwards", [0, 1, 5])
def test_a_copy_that_fails_is_an_error_and_the_model_is_usable_after_release(
    forwards: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing()
    use_link(monkeypatch, lambda: CpuLink(failing))
    model = stack(count=3)
    manager, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(forwards):
        assert equal(model, resident)
    failing.fails = True
    for _ in range(2):
        with pytest.raises(LinkError, match="Input/output error"):
            for _ in range(3):
                run(model)
    ftd_client.release(NAME)
    assert equal(model, resident)
    assert manager.phase == "idle"
    failing.fails = False
    ftd_client.offload(model, config(), NAME)
    assert equal(model, resident)


def test_a_copy_that_fails_while_a_plan_is_put_to_work_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Failing()
    failing.fails = True
    links = use_link(monkeypatch, lambda: CpuLink(failing))
    model = stack(count=3)
    resident = copy.deepcopy(model)
    # a unit that stays makes `offload()` itself wait for a copy
    with pytest.raises(LinkError, match="Input/output error"):
        offloaded(model, load_strategy=None, max_gpu_mem_fraction=0.9)
    assert len(links) == 1
    assert ftd_client.get_offload_manager(NAME).phase == "idle"
    assert equal(model, resident)
    with pytest.raises(LinkError, match="closed"):
        links[0].submit([])


def test_release_waits_for_copies_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    gate.set()
    made: list[int] = []

    def gated(copies: Sequence[Copy]) -> None:
        assert gate.wait(BOUND_S)
        move(copies)
        made.append(len(copies))

    class Closes(nn.Linear):
        """What is copied after it has begun waits: that is for the next forward, and stays on its way."""

        def __init__(self) -> None:
            super().__init__(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate.clear()
            return super().forward(x)

    use_link(monkeypatch, lambda: CpuLink(gated))
    model = stack(Block(), Block(), Closes())
    resident = copy.deepcopy(model)
    manager = offloaded(model, skip_discovery=True)
    run(model)
    assert manager.iters_before_inference == 1
    before = len(made)
    releasing = threading.Thread(target=ftd_client.release, args=(NAME,))
    releasing.start()
    assert releasing.is_alive()
    gate.set()
    releasing.join(BOUND_S)
    assert not releasing.is_alive()
    assert len(made) > before, "what was on its way has arrived"
    assert equal(model, resident)


def test_late_copies_and_other_paths_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chooses(Stack):
        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            for at in order:
                x = self.layers[at](x)
            return self.head(x)

    use_link(monkeypatch, lambda: CpuLink(Late(0.001, random.Random(3).choice([2, 3]).__rmod__)))
    model = stack(kind=Chooses, count=5)
    manager, resident = beside(model)
    chance = random.Random(1)
    for _ in range(12):
        order = tuple(chance.choices(range(5), k=chance.randint(0, 7)))
        assert equal(model, resident, x(), order), order
    assert manager.phase == "inference"
    assert x().shape[1] == D


def test_a_model_whose_copies_are_slow_still_reaches_inference_in_as_many_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_link(monkeypatch, lambda: CpuLink(Late(0.001)))
    model = stack(count=3)
    to_inference(offloaded(model), model)
