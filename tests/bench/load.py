"""Loading to the device: ftd's ways beside its peers, several followers at once, and the host memory they share."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.bench.child import Child, Found, failed_to_meet, measure
from tests.bench.loaders import LOADERS
from tests.bench.rows import Limit, Row, Target, at_least, at_most, row
from tests.bench.run import GIB, Pages, Run
from tests.bench.served import CommandError, Served, served

NAMES = ("ftd", "load_together", "two_gpus", "host_memory", *LOADERS)
#: Of the link, cold process: (way, huge pages).
_TARGETS = {("push", True): 0.93, ("push", False): 0.88, ("pull", True): 0.75, ("pull", False): 0.6}
_COLD, _TOGETHER, _HOLDERS = 2, 4, 8


def rows(run: Run) -> Iterator[Row]:
    yield from run.lacking("load")
    ways = run.ways if run.cuda else ("",)  # the CPU has one
    for pages in run.pages:
        for way in ways:
            if names := _of_daemon(run, pages, way, ways):
                yield from _served(run, pages, way, names)
    for name in run.wanted(tuple(LOADERS)):
        yield _peer(run, name)


def _of_daemon(run: Run, pages: Pages, way: str, ways: tuple[str, ...]) -> list[str]:
    """The rows for which a daemon of these pages and this way is started."""
    names = ["ftd"]
    if way == ways[0]:
        names.append("load_together")
        if pages is run.pages[0]:
            names.append("two_gpus")
    if way == ways[-1] and pages is run.pages[0]:
        names.append("host_memory")  # in the way that pins in followers
    return run.wanted(names)


def _served(run: Run, pages: Pages, way: str, names: list[str]) -> Iterator[Row]:
    settings = {"push": "never"} if way == "pull" else {}
    label = ", ".join(word for word in ("ftd", way, pages.label) if word)
    try:
        with served(run.checkpoint.folder, run.most_s, huge_pages=pages.setting, **settings) as daemon:
            if "ftd" in names:
                yield from _ours(run, daemon, label, way, pages)
            if "load_together" in names:
                yield from _together(run, daemon, label)
            if "two_gpus" in names:
                yield _two_gpus(run, daemon, label)
            if "host_memory" in names:
                yield _host_memory(run, daemon, label)
    except CommandError as error:
        yield Row("load", label, problem=str(error))


def _ours(run: Run, daemon: Served, label: str, way: str, pages: Pages) -> Iterator[Row]:
    """Cold processes one after the other: on a GPU the first one is also the first that this daemon pushes to."""
    runs = [
        measure("tests.bench.followers:load", most_s=run.most_s, namespace=daemon.namespace, device=run.device)
        for _ in range(_COLD)
    ]
    attached = ", ".join(f"{1e3 * found['attach_s']:.1f}" for found in runs if "attach_s" in found)
    note = f"{daemon.huge}; attach before it {attached} ms"
    for nth, least in (("first", _TARGETS.get((way, pages.huge))), ("second", 0.97 if run.cuda else None)):
        loads = [found.get(nth, found) for found in runs]
        target = at_least(least) if least else None
        yield _rate(run, f"{label}: {nth} in a process", loads, way=way, target=target, note=note)
        note = "the same follower, memory that torch has kept"


def _peer(run: Run, name: str) -> Row:
    found = measure(
        "tests.bench.loaders:load", most_s=run.most_s, name=name, folder=str(run.checkpoint.folder),
        file=str(run.checkpoint.file), device=run.device,
    )  # fmt: skip
    return _rate(run, name, [found], note=inspect.getdoc(LOADERS[name]) or "", ours=False)


def _rate(
    run: Run,
    what: str,
    loads: list[Found],
    *,
    way: str = "",
    target: Target | None = None,
    note: str = "",
    ours: bool = True,
) -> Row:
    """Bytes per second of loads, the mean of several, whose content is that of the source."""
    problem = ""
    for found in loads:
        if "seconds" not in found:
            return row("load", what, found, "seconds", ours=ours)
        if found["digest"] != run.digest:
            problem = "the content differs from the checkpoint's"
        elif way and found["way"] != way:
            problem = f"took the way `{found['way']}`: {found['why']}"
    rates = [run.checkpoint.nbytes / found["seconds"] / 1e9 for found in loads]
    if len(rates) > 1:
        note = f"mean of {', '.join(f'{rate:.2f}' for rate in rates)}; {note}"
    rate = statistics.harmonic_mean(rates)
    return Row(
        "load", what, rate, "GB/s", limit=run.load_limit, target=target, note=note, ours=ours, problem=problem
    )  # fmt: skip


def _together(run: Run, daemon: Served, label: str) -> Iterator[Row]:
    what = f"{label}: {_TOGETHER} followers at once"
    results = _at_once(run, daemon, [run.device] * _TOGETHER)
    target = at_least(0.85) if run.cuda else None
    yield _aggregate(run, what, results, run.load_limit, target)
    if all("begun" in result for result in results):
        times = [result["seconds"] for result in results]
        spread = 100 * (max(times) / min(times) - 1)
        yield Row(
            "load", f"{what}: the slowest behind the fastest", spread, "%", target=at_most(15) if run.cuda else None
        )


def _two_gpus(run: Run, daemon: Served, label: str) -> Row:
    what = f"{label}: cuda:0 and cuda:1 at once"
    count = torch.cuda.device_count()
    if not run.cuda or count < 2:
        return Row("load", what, problem=f"{count} GPUs here", skipped=True)
    devices = ["cuda:0", "cuda:1"]
    links = [measure("tests.bench.limits:link", most_s=run.most_s, device=device) for device in devices]
    if any("error" in link for link in links):
        return Row("load", what, problem="a link could not be measured")
    limit = Limit("both links", sum(link["bytes_per_s"] for link in links) / 1e9)
    first = _aggregate(run, what, _at_once(run, daemon, devices), limit, None)
    again = _aggregate(run, what, _at_once(run, daemon, devices), limit, at_least(0.8))
    if first.value is None or first.problem or again.value is None:
        return first if first.problem or first.value is None else again
    note = f"{again.note}; {first.value:.1f} GB/s the first time, when the daemon makes its context on cuda:1"
    return dataclasses.replace(again, note=note)


def _at_once(run: Run, daemon: Served, devices: list[str]) -> list[Found]:
    """A follower for each device, all of which begin when the last one is ready."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    "tests.bench.followers:load_together", most_s=run.most_s, namespace=daemon.namespace, device=device
                )
            )
            for device in devices
        ]
        if failed := failed_to_meet(children):
            return [failed]
        for child in children:
            child.go()
        return [child.result() for child in children]


def _aggregate(run: Run, what: str, results: list[Found], limit: Limit | None, target: Target | None) -> Row:
    """All their bytes, from the first one's begin to the last one's end."""
    for result in results:
        if "begun" not in result:
            return row("load", what, result, "begun")
    seconds = max(result["ended"] for result in results) - min(result["begun"] for result in results)
    rate = len(results) * run.checkpoint.nbytes / seconds / 1e9
    whole = all(result["digest"] == run.digest for result in results)
    problem = "" if whole else "the content differs from the checkpoint's"
    note = "by " + ", ".join(sorted({result["way"] for result in results}))
    return Row("load", what, rate, "GB/s", limit=limit, target=target, note=note, problem=problem)


def _host_memory(run: Run, daemon: Served, label: str) -> Row:
    """PSS summed over the weights' mappings in followers and daemon, while all hold every page, pinned on a GPU."""
    what = f"{label}: host memory, {_HOLDERS} followers and daemon ÷ weights"
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child("tests.bench.followers:hold", most_s=run.most_s, namespace=daemon.namespace, device=run.device)
            )
            for _ in range(_HOLDERS)
        ]
        if failed := failed_to_meet(children):
            return row("load", what, failed, "pss")
        total = daemon.status["model"]["bytes"]
        pinned = _pinned(daemon, _HOLDERS * total) if run.cuda else 0
        pids = [child.pid for child in children]
        pss = sum(_mapped_pss(pid, daemon.namespace) for pid in [*pids, daemon.pid])
        tables = sum(_field(Path(f"/proc/{pid}/status"), "VmPTE:") for pid in pids)
        for child in children:
            child.go()
        for child in children:
            child.result()  # so that they end by themselves
    note = f"PSS of the mappings; page tables {tables / 2**20:.0f} MiB; pinned by followers {pinned / GIB:.1f} GiB"
    return Row("load", what, pss / total, target=at_most(1.02) if total >= 4 * GIB else None, note=note)


def _pinned(daemon: Served, most: int) -> int:
    """Bytes that all followers have pinned, once they have pinned `most` or for 3 s no more: they do it in threads."""
    pinned, since = 0, time.monotonic()
    while pinned < most and time.monotonic() < since + 3:
        now = sum(follower["pinned_bytes"] for follower in daemon.now()["followers"])
        if now > pinned:
            pinned, since = now, time.monotonic()
        time.sleep(0.1)
    return pinned


def _mapped_pss(pid: int, namespace: str) -> int:
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = f"/dev/shm/ftd.{namespace}.g" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))
