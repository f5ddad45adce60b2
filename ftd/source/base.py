"""What a checkpoint is to the rest of ftd: files, tensors at byte offsets, sidecar files.

Values only: whoever holds a `Checkpoint` has read headers and no weights, and keeps nothing open.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import SourceChangedError
from ftd.packing import pack
from ftd.source.strided import Strides
from ftd.source.wording import shown
from ftd.tensorspec import TensorSpec

#: Bytes of header digest and fingerprint: 128 bits tell apart, nobody attacks them (whoever may write the
#: checkpoint may write any weights).
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file whose bytes will be read, as it was when its header was read.

    Attributes:
        path: as it will be opened; absolute, its last part may be a link.
        name: relative to the model's directory, as the index writes it.
        bytes: size of the file.
        mtime_ns: as fstat gave it, like `inode` and `device`.
        header_digest: hex blake2b-128 of the header's bytes.
        ctime_ns: as fstat gave it, 0 where it is not to be compared. No program can set it: it tells of a rewrite in
            place whose mtime was put back.
    """

    path: Path
    name: str
    bytes: int
    mtime_ns: int
    inode: int
    device: int
    header_digest: str
    ctime_ns: int = 0

    @classmethod
    def of(cls, path: Path, name: str, status: os.stat_result, header: builtins.bytes) -> SourceFile:
        """The file that `status` was taken of and whose header, or what else says what is in it, is `header`."""
        return cls(
            path=path,
            name=name,
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            device=status.st_dev,
            header_digest=hashlib.blake2b(header, digest_size=DIGEST_BYTES).hexdigest(),
            ctime_ns=status.st_ctime_ns,
        )

    def check_unchanged(self, fd: int) -> None:
        """Compares the open file `fd` with what the header belonged to; call it before and after reading.

        A new mode, owner, name or link counts as well, which nobody can tell from a write that put the mtime back. Not
        a guarantee where the file system keeps no ctime.

        Raises:
            SourceChangedError: size, mtime, ctime, inode or device differ.
        """
        now = os.fstat(fd)
        pairs = {
            "bytes": (self.bytes, now.st_size),
            "mtime_ns": (self.mtime_ns, now.st_mtime_ns),
            "inode": (self.inode, now.st_ino),
            "device": (self.device, now.st_dev),
            "ctime_ns": (self.ctime_ns, now.st_ctime_ns if self.ctime_ns else 0),
        }
        changes = [f"{what} {before} is now {after}" for what, (before, after) in pairs.items() if before != after]
        if changes:
            raise SourceChangedError(
                f"{shown(self.path)} changed while it was read: {', '.join(changes)}",
                "wait until nothing writes to the checkpoint, then start again",
            )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its bytes lie.

    Attributes:
        spec: name, element type, shape; its `nbytes` is the length.
        file: index into `Checkpoint.files`.
        offset: absolute byte offset in that file, of any alignment.
        strides: elements from neighbour to neighbour in each dimension; None where the tensor's bytes lie there as
            followers see them. See `strided.py`.
    """

    spec: TensorSpec
    file: int
    offset: int
    strides: Strides = None


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A small file beside the weights that a loader of the model wants.

    Attributes:
        name: relative posix path in the model's directory; UTF-8.
        path: absolute, its last part may be a link.
        bytes: size when it was listed; whoever reads it finds out whether that still holds.
        mtime_ns: modification time when it was listed; only the fingerprint asks.
    """

    name: str
    path: Path
    bytes: int
    mtime_ns: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, checked as far as headers and sizes tell.

    Attributes:
        path: absolute and free of links, except that the last part of a file's or an index's path may be one.
        kind: format of the files.
        files: sorted by name.
        tensors: sorted by file, then offset; names are unique.
        sidecars: sorted by name.
        notes: what was ignored or skipped and why, one line each, for the log.
    """

    path: Path
    kind: str
    files: tuple[SourceFile, ...]
    tensors: tuple[StoredTensor, ...]
    sidecars: tuple[Sidecar, ...]
    notes: tuple[str, ...]

    @functools.cached_property
    def ties(self) -> dict[str, str]:
        """Names of tensors whose very bytes another one before them has, of the same type and shape: and its name."""
        first: dict[tuple[object, ...], str] = {}
        found = {}
        for tensor in self.tensors:
            spec = tensor.spec
            if spec.nbytes:  # a tensor without elements shares nothing
                place = (tensor.file, tensor.offset, tensor.strides, spec.dtype, spec.shape)
                kept = first.setdefault(place, spec.name)
                if kept != spec.name:
                    found[spec.name] = kept
        return found

    def fingerprint(self) -> str:
        """Hex blake2b-128 of the checkpoint's identity; computed anew at each call.

        It covers the path, each file's name, size, mtime, inode and header digest, which tensors are taken from
        which file (an edited index changes nothing else), and the sidecars (adopted weights must not come with an
        outdated config.json). The device is left out: its number changes when a network file system is mounted anew.
        """
        identity = [
            os.fsencode(self.path),
            self.kind,
            [[os.fsencode(f.name), f.bytes, f.mtime_ns, f.inode, f.header_digest] for f in self.files],
            [[tensor.file, tensor.spec.name] for tensor in self.tensors],
            [[sidecar.name, sidecar.bytes, sidecar.mtime_ns] for sidecar in self.sidecars],
        ]
        return hashlib.blake2b(pack(identity), digest_size=DIGEST_BYTES).hexdigest()
