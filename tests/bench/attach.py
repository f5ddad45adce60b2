"""Attaching: the time it takes, many at once, and what a thousand heartbeats cost the daemon."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.bench.child import Child, Found, failed_to_meet, measure
from tests.bench.rows import Row, at_most, row
from tests.bench.run import Run
from tests.bench.served import CommandError, Served, served

NAMES = ("attach", "attach_crowd", "heartbeats")
_IDLE_S, _WATCHED_S = 2, 5
_CROWD, _CROWD_PROCESSES = 256, 16
_LEASES, _LEASE_PROCESSES = 1000, 10


def rows(run: Run) -> Iterator[Row]:
    yield from run.lacking("attach")
    for pages in run.pages:
        first = pages is run.pages[0]
        names = run.wanted(NAMES if first else NAMES[:1])
        if not names:
            continue
        try:
            with served(run.checkpoint.folder, run.most_s, huge_pages=pages.setting) as daemon:
                if "attach" in names:
                    yield from _attach(run, daemon, pages.label)
                if "attach_crowd" in names:
                    yield _crowd(run, daemon)
                if "heartbeats" in names:
                    yield _heartbeats(run, daemon)
        except CommandError as error:
            yield Row("attach", pages.label, problem=str(error))


def _attach(run: Run, daemon: Served, label: str) -> Iterator[Row]:
    found = measure(
        "tests.bench.followers:attach", most_s=run.most_s, namespace=daemon.namespace, device=run.device, times=21
    )
    what = f"attach, {daemon.status['model']['tensors']} tensors, {label}"
    yield row("attach", f"{what}: first in a process", found, "first_s", per=1e-3, unit="ms", target=at_most(10))
    if "again_s" in found:
        again = [1e3 * seconds for seconds in found["again_s"]]
        note = f"median of {len(again)}; the slowest {max(again):.1f} ms"
        yield Row("attach", f"{what}: again", statistics.median(again), "ms", note=note)
        yield row("attach", f"state_dict of all of them, {label}", found, "state_dict_s", per=1e-3, unit="ms")


def _crowd(run: Run, daemon: Served) -> Row:
    """Attachments that begin together, from threads of several processes, all held until the last one stands."""
    what = f"{_CROWD} attachments at once from {_CROWD_PROCESSES} processes, p99"
    with ExitStack() as stack:
        children = _crowd_of(stack, run, daemon, _CROWD_PROCESSES, _CROWD // _CROWD_PROCESSES)
        if failed := _all_attached(children):
            return row("attach", what, failed, "p99")
        held = _held(daemon)
        results = _ended(children)
    times = sorted(1e3 * seconds for result in results for seconds in result.get("times_s", ()))
    p99 = times[math.ceil(0.99 * len(times)) - 1]
    note = f"median {statistics.median(times):.1f} ms; status counts {held} leases; {run.cores} cores"
    return Row("attach", what, p99, "ms", target=at_most(100) if run.cores >= 16 else None, note=note)


def _heartbeats(run: Run, daemon: Served) -> Row:
    """The daemon's CPU time while so many leases are held and beat."""
    what = f"{_LEASES} leases held: the daemon's share of a core"
    idle = _cpu_share(daemon.pid, _IDLE_S)
    with ExitStack() as stack:
        children = _crowd_of(stack, run, daemon, _LEASE_PROCESSES, _LEASES // _LEASE_PROCESSES)
        if failed := _all_attached(children):
            return row("attach", what, failed, "share")
        held = _held(daemon)
        busy = _cpu_share(daemon.pid, _WATCHED_S)
        _ended(children)
    note = f"over {_WATCHED_S} s; {100 * idle:.2f} % with none; status counts {held} leases"
    return Row("attach", what, 100 * busy, "%", target=at_most(1), note=note)


def _crowd_of(stack: ExitStack, run: Run, daemon: Served, processes: int, each: int) -> list[Child]:
    """Processes that are to hold `each` leases."""
    crowd = "tests.bench.followers:crowd"
    most_s = run.most_s + _WATCHED_S
    return [
        stack.enter_context(Child(crowd, most_s=most_s, namespace=daemon.namespace, count=each))
        for _ in range(processes)
    ]


def _all_attached(children: list[Child]) -> Found | None:
    """Lets them attach, all at once; None when they hold what they were to hold, else what failed."""
    if failed := failed_to_meet(children):
        return failed
    for child in children:
        child.go()
    return failed_to_meet(children)


def _ended(children: list[Child]) -> list[Found]:
    for child in children:
        child.go()
    return [child.result() for child in children]


def _held(daemon: Served) -> int:
    return len(daemon.now()["followers"])


def _cpu_share(pid: int, seconds: float) -> float:
    begun_ns, begun = _cpu_ns(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_ns(pid) - begun_ns) / 1e9 / (time.monotonic() - begun)


def _cpu_ns(pid: int) -> int:
    """Time on a processor of all threads; /proc/<pid>/stat counts in hundredths of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
