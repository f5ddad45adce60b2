"""Random trees under random configurations, plans, delays and commands give the resident model's bits, always."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import ftd_client
from ftd.errors import OffloadConfigError
from ftd_client import OffloadConfig, OffloadManager
from ftd_client.strategy import AllStreamed, Plan, Problem, assemble, workloads
from ftd_client.stream.cpu_link import CpuLink, move
from ftd_client.stream.link import Copy
from ftd_client.stream.units import OffloadError
from tests.random_trees import BoomError, D, Node, Tree, Turn

from .offloading import NAME, config, released, use_link

pytestmark = pytest.mark.usefixtures(released.__name__)

PATTERNS = ["layers.*", "*", "layers.*.kids.*", "class:Linear", "layers.*.weight"]
FORWARDS = 9


class Smallest:
    """All streams through as little memory as can be, as whole layers (0) or as finely as can be (-1)."""

    def __init__(self, index: int) -> None:
        self._index = index

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[self._index]
        return assemble(work, work.streamable, work.ring_floor(work.streamable), "smallest")


class AnyPlan:
    """Any of the plans that are possible."""

    def __init__(self, rnd: random.Random) -> None:
        self._rnd = rnd

    def plan(self, problem: Problem) -> Plan:
        work = self._rnd.choice(workloads(problem))
        streamed = [index for index in work.streamable if self._rnd.random() < 0.7]
        return assemble(work, streamed, self._rnd.randint(0, work.ring_cap), "any")


def any_link(rnd: random.Random) -> CpuLink:
    """Copies at once, late, or one in seven of them late."""
    period = rnd.choice([0, 1, 7])
    never = threading.Event()
    delays = random.Random(rnd.random())
    count = 0

    def late(copies: Sequence[Copy]) -> None:
        nonlocal count
        count += 1
        if period and count % period == 0:
            never.wait(delays.random() * 0.002)
        move(copies)

    return CpuLink(copy=late)


def any_config(rnd: random.Random) -> OffloadConfig:
    transfer = rnd.choice(["strategy", "strategy", "raw_block_transfer", "allocation_block_transfer"])
    by_hand = rnd.random() < 0.3
    return config(
        include_patterns=[] if by_hand else [rnd.choice(PATTERNS)],
        transfer_mode=transfer,
        profile_mode=rnd.choice(["view", "view", "getter", *(["torch_function"] if transfer == "strategy" else [])]),
        load_strategy=rnd.choice([AllStreamed(), Smallest(0), Smallest(-1), AnyPlan(rnd), None]),
        num_blocks=rnd.choice([2, 4, 9]),
        discovery_iters=rnd.randint(0, 2),
        profiling_iters=rnd.randint(0, 3),
        skip_discovery=not by_hand and rnd.random() < 0.3,
        max_gpu_mem_fraction=rnd.choice([None, 0.5]),
        enable_diagnostics=rnd.random() < 0.2,
    )


class Pair:
    """An offloaded model and the resident one, which do the same."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        torch.manual_seed(seed)
        self.model: nn.Module = Tree(self.rnd).eval()
        self.resident = copy.deepcopy(self.model)
        self.config = any_config(self.rnd)

    @property
    def manager(self) -> OffloadManager:
        return ftd_client.get_offload_manager(NAME)

    def offload(self) -> None:
        ftd_client.offload(self.model, self.config, NAME)

    def turn(self) -> Turn:
        regions = not self.manager.skip_discovery_honored
        return Turn(self.rnd.randrange(8), self.rnd.random() < 0.15, NAME if regions else "")

    def forward(self) -> None:
        """The whole model, or one of its modules by itself."""
        path = ""
        if self.rnd.random() < 0.25:
            path = self.rnd.choice([name for name, module in self.model.named_modules() if isinstance(module, Node)])
        self.check(path, self.turn())

    def check(self, path: str, turn: Turn) -> None:
        x = torch.randn(2, 3, D)
        expected = outcome(self.resident.get_submodule(path), x, Turn(turn.bits, turn.boom))
        found = outcome(self.model.get_submodule(path), x, turn)
        assert (found is None) == (expected is None), path
        assert found is None or expected is None or torch.equal(found, expected), path

    def command(self) -> None:
        """One of those that are allowed between forwards, or none."""
        commands: list[Callable[[], object]] = [
            self.manager.suspend_profiling,
            self.manager.resume_profiling,
            self.manager.clear_profiling_durations,
            self.manager.pause_profiling,
            self.manager.update_state,
            self.offload_again,
            self.compare_states,
        ]
        if self.rnd.random() < 0.25:
            self.rnd.choice(commands)()

    def offload_again(self) -> None:
        ftd_client.release(NAME)
        self.offload()

    def compare_states(self) -> None:
        state = self.model.state_dict()
        assert [name for name, value in self.resident.state_dict().items() if not torch.equal(value, state[name])] == []


def outcome(module: nn.Module, x: torch.Tensor, turn: Turn) -> torch.Tensor | None:
    """The output; None where the model's own code raised."""
    with torch.no_grad():
        try:
            found: torch.Tensor = module(x, turn)
        except BoomError:
            return None
    return found


def refused(error: Exception) -> bool:
    """Whether a random configuration does not fit the random model."""
    return "nothing to offload" in str(error) or "tensors are shared between layers" in str(error)


def play(seed: int) -> bool:
    """Whether the model could be offloaded; what was found is raised."""
    pair = Pair(seed)
    try:
        pair.offload()  # regions are checked at the end of discovery, so a refusal may come from a forward
        for _ in range(FORWARDS):
            pair.forward()
            pair.command()
    except (OffloadConfigError, OffloadError) as error:
        if not refused(error):
            raise
        return False
    finally:
        ftd_client.release(NAME)
    pair.check("", Turn(bits=5))
    pair.compare_states()
    return True


def play_all(monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]) -> None:
    delays = random.Random(seeds[0])
    use_link(monkeypatch, lambda: any_link(delays))
    played = 0
    for seed in seeds:
        try:
            played += play(seed)
        except Exception as error:
            error.add_note(f"seed {seed} of {seeds}")
            raise
    assert played >= len(seeds) // 4  # three of four configurations fit their model; a chunk of few may have less luck


def chunks(start: int, count: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(start, start + count * size, size)]


# 10, 16, 25: attention called within a region; 1934: its weights are read by the module around it too
@pytest.mark.parametrize("seeds", [*chunks(0, 7, 8), *chunks(1928, 1, 8)], ids=str)
def test_bits_are_those_of_the_resident_model(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    play_all(monkeypatch, seeds)


@pytest.mark.long
@pytest.mark.parametrize("seeds", chunks(1_000, 20, 200), ids=str)
def test_bits_of_thousands_of_models(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    play_all(monkeypatch, seeds)
