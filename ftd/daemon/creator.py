"""Materializing a generation from a checkpoint: headers → plan → segments → bytes → the rest of the build.

Runs in a thread beside the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ftd.config.model import DaemonConfig
from ftd.daemon.build import Build, Generation, LoadCancelledError, make_plan
from ftd.daemon.fill import Filler, plan_reads
from ftd.daemon.progress import LoadProgress
from ftd.daemon.prove import prove_files, prove_memory
from ftd.errors import InternalError
from ftd.shm.digest import PieceDigests
from ftd.shm.names import Names
from ftd.shm.segment import Access
from ftd.source.base import Checkpoint
from ftd.source.resolve import resolve
from ftd.source.sidecars import read_sidecar


def materialize(
    names: Names,
    generation: int,
    config: DaemonConfig,
    access: Access,
    progress: LoadProgress,
    *,
    holders: Callable[[], str],
    note: Callable[[str], None],
) -> Generation:
    """Builds the generation from the configured checkpoint.

    Args:
        holders: names who holds memory of earlier generations, for the message when memory is short.
        note: told what a person should know: files that were ignored, pages that were not locked.

    Raises:
        LoadCancelledError: it was asked to end.
        FtdError: anything a user can cause.
    """
    if config.model is None:
        raise InternalError("a configuration without a model reached the loader")
    checkpoint = resolve(config.model, config.allow_types or ())
    for text in checkpoint.notes:
        note(text)
    plan = make_plan(
        [stored.spec for stored in checkpoint.tensors],
        checkpoint.ties,
        config,
        layers=config.layers or (),
        file_bytes=sum(sidecar.bytes for sidecar in checkpoint.sidecars),
        holders=holders,
        note=note,
    )
    with ExitStack() as undo:
        progress.enter("loading")
        progress.start(plan.layout.tensor_bytes)
        build = Build(names, generation, plan, config, access, undo)
        # before the weights: a file that changed since it was listed ends the load now, not after minutes of reading
        build.write_files({sidecar.name: read_sidecar(sidecar) for sidecar in checkpoint.sidecars})
        digests = _fill(checkpoint, build, config, progress)
        progress.end()
        if config.verify == "full":
            progress.enter("verifying")
            prove_memory(build.layout, build.segments, digests, config.read_threads, lambda: _step(progress))
            prove_files(checkpoint, build.layout, build.views, config.read_threads, lambda: _step(progress), note)
        made = build.finish(
            progress,
            cancelled=progress.cancelled,
            note=note,
            identity=checkpoint.fingerprint(),
            source=_source(checkpoint, config),
            digests=digests,
        )
        build.keep()
        return made


def _fill(checkpoint: Checkpoint, build: Build, config: DaemonConfig, progress: LoadProgress) -> tuple[bytes, ...]:
    """Fills the segments; gives the digest of each tensor, or none at all."""
    extents = {placed.spec.name: placed.extent for placed in build.layout.tensors}
    digests = None if config.verify == "none" else PieceDigests()
    filler = Filler(
        checkpoint.files,
        build.views,
        threads=config.read_threads,
        cancelled=progress.cancelled,
        done=progress.add,
        digests=digests,
    )
    stored = [tensor for tensor in checkpoint.tensors if tensor.spec.name not in checkpoint.ties]
    filler.run(plan_reads(stored, extents))
    _stop_if(progress)
    build.pad()
    return () if digests is None else build.digests(digests)


def _source(checkpoint: Checkpoint, config: DaemonConfig) -> dict[str, Any]:
    return {
        "kind": checkpoint.kind,
        "path": str(checkpoint.path),
        "files": [{"name": file.name, "bytes": file.bytes} for file in checkpoint.files],
        **({"allow_types": list(config.allow_types)} if config.allow_types else {}),
    }


def _stop_if(progress: LoadProgress) -> None:
    if progress.cancelled():
        raise LoadCancelledError


def _step(progress: LoadProgress) -> None:
    progress.tick()
    _stop_if(progress)
