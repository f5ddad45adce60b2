"""Publishing: `ftd start` from the page cache and from a cold disk, against a plain copy and the disk itself; and from
a process that has the weights in its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import checkpoint
from tests.bench.child import Found, measure
from tests.bench.rows import Limit, Row, at_least, row
from tests.bench.run import Pages, Run
from tests.bench.served import NAMESPACE, CommandError, Served, served

NAMES = ("publish_cached", "publish_cold", "publish_wall", "publish_process")
ROUNDS = 3


def rows(run: Run) -> Iterator[Row]:
    yield from run.lacking("publish")
    for pages in run.pages:
        if run.wants("publish_cached"):
            yield from _cached(run, pages)
        if run.wants("publish_wall"):
            yield _wall(run, pages)
        if run.wants("publish_process"):
            yield _process(run, pages)
    if run.pages and run.wants("publish_cold"):
        yield _cold(run, run.pages[0])


def _cached(run: Run, pages: Pages) -> Iterator[Row]:
    """The daemon and a plain copy in turns, the same threads, nothing pinned; medians."""
    what = f"from the page cache, {pages.label}"
    plain: list[float] = []
    ours: list[float] = []
    huge = ""
    for _ in range(ROUNDS):
        copied = measure(
            "tests.bench.limits:plain_copy", most_s=run.most_s, file=str(run.checkpoint.file), threads=run.threads,
            huge=pages.huge,
        )  # fmt: skip
        if "bytes_per_s" not in copied:
            yield row("publish", f"plain copy, {pages.label}", copied, "bytes_per_s")
            return
        plain.append(copied["bytes_per_s"] / 1e9)
        found = _published(run, pages, pin="none")
        if "error" in found:
            yield row("publish", what, found, "bytes_per_s")
            return
        ours.append(found["bytes_per_s"] / 1e9)
        huge = found["huge"]
    limit = Limit(f"copy by {run.threads} threads", statistics.median(plain))
    # promised for 2 MiB pages: first touch of 4 KiB pages bounds both alike
    target = at_least(0.8) if pages.huge else None
    note = f"{huge}; median of {ROUNDS}"
    yield Row("publish", what, statistics.median(ours), "GB/s", limit=limit, target=target, note=note)


def _wall(run: Run, pages: Pages) -> Row:
    """What a user waits for, pinning as it comes."""
    what = f"`ftd start --detach` until ready, {pages.label}"
    found = _published(run, pages)
    return row("publish", what, found, "start_s", unit="s", note=f"the command, pin {found.get('pin')}")


def _cold(run: Run, pages: Pages) -> Row:
    """Between two plain reads of the same file, the faster of which is the disk's rate: what is below a virtual disk
    may have caches too."""
    what = f"from a cold disk, {pages.label}"
    file = str(run.checkpoint.file)
    try:
        if (stayed := checkpoint.cool(Path(file))) > 0.01:
            reason = f"{100 * stayed:.0f} % of the file stay in the page cache of this filesystem"
            return Row("publish", what, problem=reason, skipped=True)
        before = measure("tests.bench.limits:disk", most_s=run.most_s, file=file)
        if "bytes_per_s" not in before:
            return row("publish", what, before, "bytes_per_s")
        checkpoint.cool(Path(file))
        found = _published(run, pages, pin="none")
        checkpoint.cool(Path(file))
        after = measure("tests.bench.limits:disk", most_s=run.most_s, file=file)
    finally:
        checkpoint.warm(Path(file))  # for what comes after
    rates = [one["bytes_per_s"] / 1e9 for one in (before, after) if "bytes_per_s" in one]
    limit = Limit("direct reads, one after the other", max(rates))
    note = f"{found['start_s']:.2f} s until ready" if "start_s" in found else ""
    return row(
        "publish", what, found, "bytes_per_s", per=1e9, unit="GB/s", limit=limit, target=at_least(0.95), note=note
    )


def _process(run: Run, pages: Pages) -> Row:
    """The whole call, beside the same copy."""
    what = f"by `ftd_client.publish` from a process, {pages.label}"
    file = str(run.checkpoint.file)
    copied = measure(
        "tests.bench.limits:plain_copy", most_s=run.most_s, file=file, threads=run.threads, huge=pages.huge
    )
    limit = Limit(f"copy by {run.threads} threads", copied["bytes_per_s"] / 1e9) if "bytes_per_s" in copied else None
    try:
        with served(None, run.most_s, huge_pages=pages.setting, read_threads=run.threads, pin="none") as daemon:
            found = measure("tests.bench.publish:hand_over", most_s=run.most_s, file=file, namespace=NAMESPACE)
            huge = Served(daemon.namespace, daemon.now(), 0.0).huge if "bytes_per_s" in found else ""
    except CommandError as error:
        found, huge = {"error": str(error)}, ""
    return row("publish", what, found, "bytes_per_s", per=1e9, unit="GB/s", limit=limit, note=huge)


def hand_over(file: str, namespace: str) -> Found:
    """Its tensors lie in memory of its own before the clock starts."""
    from safetensors.torch import load_file

    import ftd_client

    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    begun = time.perf_counter()
    nbytes = ftd_client.publish(namespace, tensors).nbytes
    return {"bytes_per_s": nbytes / (time.perf_counter() - begun)}


def _published(run: Run, pages: Pages, **settings: str) -> Found:
    try:
        with served(
            run.checkpoint.folder, run.most_s, huge_pages=pages.setting, read_threads=run.threads, **settings
        ) as daemon:
            return _facts(daemon)
    except CommandError as error:
        return {"error": str(error)}


def _facts(daemon: Served) -> Found:
    """The daemon's own figure, from the first byte to the last one in place; its command's time."""
    status = daemon.status
    rate = status["progress"]["bytes_per_s"]
    return {"bytes_per_s": rate, "start_s": daemon.start_s, "huge": daemon.huge, "pin": status["pin"]}
