"""`ftd verify`: whether live weights are still what was published, and with `--source` whether the files are.

Needs no answer of the daemon and changes nothing: whoever may attach may verify. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any

from ftd.clock import NS, monotonic_ns
from ftd.daemon.reread import Check, Span, compare
from ftd.daemon.verify_source import check_has_files, compare_source
from ftd.errors import ConfigError, CreatorFailedError, FtdError, NotReadyError, NotRunningError, SegmentError
from ftd.shm.coord import CoordRecord, observe
from ftd.shm.manifest import MAX_FILES_BYTES, Manifest, decode_files, read_published, read_segment
from ftd.shm.names import Names
from ftd.shm.segment import Segment, path_of
from ftd.shm.state import State

#: Memory is read no faster by more.
_THREADS = 16

#: `show(what, total_bytes)`, in a `with`, gives a function that is told the bytes done.
Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def report(namespace: str, *, source: bool, show: Show) -> dict[str, Any]:
    """The object of `--json`.

    Raises:
        NotRunningError: no daemon holds the namespace.
        NotReadyError: it has not published yet, or ends.
        CreatorFailedError: it could not publish.
        SegmentError: its manifest is damaged.
        ConfigError: it was published without digests.
        UsageError: `source`, and it came from a process.
        AccessError: this user may not read it.
    """
    names = Names(namespace)
    begun_ns, threads = monotonic_ns(), min(_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        manifest, segments = _open(names, stack)
        if manifest.tensors and not manifest.digests:
            raise ConfigError(
                f"{namespace} was published without digests: found verify: none, expected fingerprint or full",
                "leave `verify` out of the daemon's configuration and start it again",
            )
        if source:
            check_has_files(manifest)
        problems = [found for found in segments if isinstance(found, str)] + _sidecar_problems(names, manifest)
        with show("segments", manifest.tensor_bytes) as step:
            differing = compare(list(_live(manifest, segments)), threads=threads, step=step)
        told = compare_source(manifest, threads, show) if source else None
    return {
        "namespace": namespace,
        "ok": not differing and not problems and (told is None or told["ok"]),
        "generation": manifest.generation,
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest(),
        "tensors": len(manifest.tensors),
        "bytes": manifest.tensor_bytes,
        "seconds": round((monotonic_ns() - begun_ns) / NS, 3),
        "differing": [asdict(difference) for difference in differing],
        "problems": problems,
        "source": told,
    }


def _open(names: Names, stack: ExitStack) -> tuple[Manifest, list[Segment | str]]:
    """The published manifest, and each of its segments or what is wrong with it."""
    while True:
        record = _published(names)
        problem: SegmentError | None = None
        try:
            manifest = read_published(names, record.generation, record.manifest_digest)
            segments = [_segment(fact.name, fact.bytes, fact.inode, stack) for fact in manifest.segments]
        except SegmentError as error:
            problem = error
        if _published(names).manifest_digest != record.manifest_digest:
            continue  # another generation was published meanwhile
        if problem is not None:
            raise problem
        return manifest, segments


def _published(names: Names) -> CoordRecord:
    seen = observe(names)
    again = f"ftd start --namespace {names.namespace}"
    if not seen.locked:
        raise NotRunningError(f"{names.namespace} is not running", f"{again} --model <path>")
    if seen.problem is not None:
        raise seen.problem
    record = seen.record
    if record is not None and record.failure is not None:
        raise CreatorFailedError(
            f"{names.namespace} could not publish: {record.failure['message']}", record.failure["remedy"]
        )
    # one that hangs is no reason not to look: its segments are there
    if record is None or record.state is not State.READY:
        state = record.state if record is not None else State.LOADING
        raise NotReadyError(
            f"{names.namespace} is {state}: expected ready", f"ftd status -n {names.namespace} --wait-ready 60"
        )
    return record


def _segment(name: str, nbytes: int, inode: int, stack: ExitStack) -> Segment | str:
    segment = Segment.open(name)
    if segment is None:
        return f"{path_of(name)} is gone"
    stack.enter_context(segment)
    for what, found, expected in (("inode", segment.inode, inode), ("bytes", segment.size, nbytes)):
        if found != expected:
            return f"{path_of(name)} has {what} {found}: expected {expected}"
    return segment


def _sidecar_problems(names: Names, manifest: Manifest) -> list[str]:
    if not manifest.files_inode:
        return []
    name = names.files(manifest.generation)
    try:
        data = read_segment(name, MAX_FILES_BYTES, inode=manifest.files_inode)
        if data is None:
            return [f"{path_of(name)} is gone"]
        decode_files(data)
    except FtdError as error:
        return [f"{path_of(name)}: {error.message}"]
    return []


def _live(manifest: Manifest, segments: Sequence[Segment | str]) -> Iterator[Check]:
    """Checks of all tensors whose segment is there."""
    for placed, digest in zip(manifest.tensors, manifest.digests, strict=True):
        extent = placed.extent
        segment = segments[extent.segment] if extent.nbytes else None
        if isinstance(segment, Segment):
            span = Span(segment.fileno(), extent.offset, extent.nbytes)
            yield Check(placed.spec.name, str(path_of(segment.name)), span, digest)
