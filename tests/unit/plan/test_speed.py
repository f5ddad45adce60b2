import random
import time

import pytest

from ftd.plan.block import Block
from ftd.plan.load import STRATEGIES
from ftd.plan.problem import Problem
from ftd.plan.strategy import make_plan
from tests.unit.plan.shapes import LINK


def _blocks(count: int) -> tuple[Block, ...]:
    rng = random.Random(count)
    sizes = [rng.choice([1, 2, 4, 4, 14, 14]) * 2**20 + rng.randrange(4) * 4096 for _ in range(count)]
    # as much compute as copying: nothing ends the search early
    return tuple(
        Block(i, f"b{i}", f"layers.{i // 7}", size, int(size / 55.4 * rng.uniform(0.2, 1.0)))
        for i, size in enumerate(sizes)
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("count", "goal_s"), [(1000, 0.5), (10_000, 5.0)])
@pytest.mark.parametrize("share", [None, 0.2])
def test_planning_takes_no_time_to_speak_of(name: str, count: int, goal_s: float, share: float | None) -> None:
    blocks = _blocks(count)
    budget = None if share is None else int(share * sum(block.nbytes for block in blocks))
    problem = Problem(blocks, LINK, budget)
    started = time.process_time()
    plan = make_plan(problem, STRATEGIES[name]())
    took_s = time.process_time() - started
    print(f"{name}, {count} blocks, budget {share}: {took_s:.3f} s, {plan.predicted.time_ns / 1e6:.1f} ms a forward")
    assert took_s < 2 * goal_s  # the goal is that of an idle machine
