"""The files of a checkpoint as they are now, against the digests of what was published from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftd.daemon.reread import Check, Difference, Span, compare
from ftd.errors import FtdError, SourceError, UsageError, os_reason
from ftd.shm.digest import PIECE_BYTES, PieceDigests
from ftd.shm.layout import Extent
from ftd.shm.manifest import Manifest
from ftd.source.access import opened, read_exactly
from ftd.source.base import SourceFile, StoredTensor
from ftd.source.resolve import resolve
from ftd.source.strided import pieces, spread
from ftd.source.wording import shown
from ftd.tensorspec import DTYPE_BITS, TensorSpec


def check_has_files(manifest: Manifest) -> None:
    """
    Raises:
        UsageError: the weights came from a process, and there are no files to compare with.
    """
    if not manifest.source["files"]:
        raise UsageError(
            f"--source: generation {manifest.generation} of {manifest.namespace} came from a process"
            f" ({shown(manifest.source['path'])}), expected files",
            f"ftd verify --namespace {manifest.namespace}, which compares what is in shared memory",
        )


def compare_source(
    manifest: Manifest, threads: int, show: Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
) -> dict[str, Any]:
    """`source` of the object that `ftd verify --json` prints."""
    path = str(manifest.source["path"])
    differing: list[Difference] = []
    problems: list[str] = []
    with ExitStack() as stack:
        try:
            checkpoint = resolve(Path(path), manifest.source.get("allow_types", ()))
            fds = [_opened(file, stack) for file in checkpoint.files]
            stored = {tensor.spec.name: tensor for tensor in checkpoint.tensors}
            checks, differing = _stored(manifest, stored, checkpoint.files, fds)
            whole = [check for check in checks if stored[check.name].strides is None]
            with show("files", sum(check.span.nbytes for check in checks)) as step:
                differing += compare(whole, threads=threads, step=step)
                for check in checks:
                    if stored[check.name].strides is not None:
                        differing += _gathered(check, stored[check.name])
                        step(check.span.nbytes)
            for file, fd in zip(checkpoint.files, fds, strict=True):
                file.check_unchanged(fd)
        except FtdError as error:
            problems.append(error.message)
    return {
        "path": path,
        "ok": not differing and not problems,
        "differing": [asdict(difference) for difference in differing],
        "problems": problems,
    }


def _opened(file: SourceFile, stack: ExitStack) -> int:
    try:
        return stack.enter_context(opened(file.path))
    except SourceError as error:
        raise SourceError(f"{file.path} {error.message}", error.remedy) from None


def _stored(
    manifest: Manifest, stored: Mapping[str, StoredTensor], files: Sequence[SourceFile], fds: Sequence[int]
) -> tuple[list[Check], list[Difference]]:
    """What to read, and what differs without being read."""
    checks, differing = [], []
    for placed, digest in zip(manifest.tensors, manifest.digests, strict=True):
        name, tensor = placed.spec.name, stored.get(placed.spec.name)
        if tensor is None:
            differing.append(Difference(name, "", 0, 0, "is in the checkpoint no more"))
            continue
        place = files[tensor.file].name
        if tensor.spec != placed.spec:
            problem = f"is {_type_of(tensor.spec)} now, published was {_type_of(placed.spec)}"
            differing.append(Difference(name, place, tensor.offset, tensor.spec.nbytes, problem))
            continue
        checks.append(Check(name, place, Span(fds[tensor.file], tensor.offset, tensor.spec.nbytes), digest))
    published = {placed.spec.name for placed in manifest.tensors}
    for name, tensor in stored.items():
        if name not in published:
            place, problem = files[tensor.file].name, "is in the checkpoint and was not published"
            differing.append(Difference(name, place, tensor.offset, tensor.spec.nbytes, problem))
    return checks, differing


def _gathered(check: Check, tensor: StoredTensor) -> list[Difference]:
    """As `compare`, of a tensor whose elements lie otherwise in the file; takes memory for that one tensor."""
    spec, strides = tensor.spec, tensor.strides or ()
    target = memoryview(bytearray(spec.nbytes))
    itemsize = DTYPE_BITS[spec.dtype] // 8
    try:
        for piece in pieces(spec.shape, strides, tensor.offset, itemsize, PIECE_BYTES):
            source = memoryview(read_exactly(check.span.fd, piece.nbytes, piece.offset))
            spread(piece, source, target, itemsize)
    except SourceError as error:
        problem = error.message
    except OSError as error:
        problem = f"cannot be read: {os_reason(error)}"
    else:
        digest = PieceDigests().of(Extent(0, 0, spec.nbytes), target)
        if digest == check.expected:
            return []
        problem = f"digest {digest.hex()}, expected {check.expected.hex()}"
    return [Difference(check.name, check.place, tensor.offset, spec.nbytes, problem)]


def _type_of(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
