"""Strategies: who chooses what stays on the GPU and what streams, and how to write one.

`OffloadConfig(load_strategy=...)` takes any object with a method `plan(problem)`. It is given a `Problem`, the blocks
of a forward in their order with what was measured of them, and returns a `Plan`. The engine proves every plan before
it runs one, so a strategy can be slow or wasteful but can never corrupt a forward.

Of a problem, `workloads` gives the arrays to choose from: one `Workload` whose blocks are whole layers and one whose
blocks are finer, where there are both. `assemble` lays the chosen blocks into a ring, decides which copy follows
which compute, and predicts the forward's time; `make_plan` is what the engine calls. A strategy that streams what is
cheapest to hide, measured by copy against compute, until the budget is kept:

    >>> class CheapestToHide:
    ...     def plan(self, problem):
    ...         work = workloads(problem)[-1]                   # the finest blocks
    ...         work.check_budget()                             # BudgetError, with the smallest that works
    ...         ring_bytes = work.smallest().ring_bytes
    ...         excess = work.total_bytes - (problem.budget_bytes or 0) + ring_bytes
    ...         streamed = []
    ...         for i in sorted(work.streamable, key=lambda i: work.copy_ns[i] / (work.compute_ns[i] + 1)):
    ...             if excess > 0 and work.sizes[i] <= work.smallest().largest:
    ...                 streamed.append(i)
    ...                 excess -= work.sizes[i]
    ...         return assemble(work, streamed, ring_bytes, "cheapest to hide")

It needs no GPU to be tried: four layers of 1 MiB, over a link of 50 GB/s, in 3 MiB.

    >>> mib = 1 << 20
    >>> times_us = (40, 10, 30, 20)
    >>> blocks = tuple(Block(i, f"layers.{i}", f"layers.{i}", mib, us * 1000) for i, us in enumerate(times_us))
    >>> link = CopyCost(latency_ns=3500.0, bytes_per_s=50e9)
    >>> problem = Problem(blocks, link, budget_bytes=3 * mib, num_blocks=2, min_blocks=2)
    >>> plan = make_plan(problem, CheapestToHide())
    >>> plan.streamed, plan.resident, plan.gpu_bytes // mib
    ((0, 2, 3), (1,), 3)
    >>> plan.predicted.time_ns >= plan.predicted.resident_ns == 100_000
    True
"""

from ftd.plan.block import Block
from ftd.plan.check import check_plan
from ftd.plan.cost import CopyCost
from ftd.plan.errors import BudgetError, PlanError
from ftd.plan.evaluate import CopyStep, Prediction, evaluate
from ftd.plan.load import STRATEGIES, load_strategy
from ftd.plan.plan import Placement, Plan, assemble
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, Auto, EvenSpread, Strategy, make_plan
from ftd.plan.workload import Workload, workloads

__all__ = [
    "STRATEGIES",
    "AllStreamed",
    "Auto",
    "Block",
    "BudgetError",
    "CopyCost",
    "CopyStep",
    "EvenSpread",
    "Placement",
    "Plan",
    "PlanError",
    "Prediction",
    "Problem",
    "Strategy",
    "Workload",
    "assemble",
    "check_plan",
    "evaluate",
    "load_strategy",
    "make_plan",
    "workloads",
]
