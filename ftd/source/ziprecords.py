"""Where the members of a zip archive lie, as far as torch.save uses the format: stored, not compressed.

Read by hand (PKWARE APPNOTE 6.3, sections 4.3 to 4.5.3): weights are read at their offsets and never through an
archive's reader, and the sizes that the file states are checked before anything of that size is allocated. Checksums
are not looked at, as torch itself doesn't. Messages carry no path.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ftd.errors import SourceError
from ftd.source.access import read_exactly
from ftd.source.wording import DOWNLOAD_AGAIN, quoted

#: Largest directory of members that is read: about a million of them.
MAX_DIRECTORY_BYTES = 100_000_000

_END = struct.Struct("<4sHHHHIIH")  # 4.3.16
_END64_LOCATOR = struct.Struct("<4sIQI")  # 4.3.15
_END64 = struct.Struct("<4sQHHIIQQQQ")  # 4.3.14
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")  # 4.3.12
_LOCAL = struct.Struct("<4sHHHHHIIIHH")  # 4.3.7
_MAX_COMMENT_BYTES = 0xFFFF
_SATURATED = 0xFFFFFFFF  # the value is in the extra field of zip64
_ZIP64_EXTRA = 1
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A member as the directory describes it.

    Attributes:
        local: offset of its own header.
        unusable: why its bytes cannot be read as they lie; empty if they can.
    """

    name: bytes
    local: int
    nbytes: int
    unusable: str


@dataclass(frozen=True, slots=True)
class Directory:
    """All members by name, and the directory's bytes; `begin` is where they lie, behind every member."""

    records: dict[bytes, Record]
    raw: bytes
    begin: int


def read_directory(fd: int, file_bytes: int) -> Directory:
    """The members of the archive.

    Raises:
        SourceError: cut short, damaged, or in several parts.
    """
    begin, nbytes, count = _find(fd, file_bytes)
    if nbytes > MAX_DIRECTORY_BYTES:
        raise SourceError(
            f"has a zip directory of {nbytes} bytes, expected at most {MAX_DIRECTORY_BYTES}", DOWNLOAD_AGAIN
        )
    raw = read_exactly(fd, nbytes, begin)
    records: dict[bytes, Record] = {}
    seen: set[bytes] = set()
    at = 0
    while at < nbytes:
        record, at = _entry(raw, at)
        name = record.name.lower()  # torch finds members whatever their case, and of several not the same as we would
        if name in seen:
            raise SourceError(f"has the member {_shown(record.name)} more than once", DOWNLOAD_AGAIN)
        seen.add(name)
        records[record.name] = record
    if len(records) != count:
        raise _damaged(f"it lists {len(records)} members, expected {count}")
    return Directory(records, raw, begin)


def data_offset(fd: int, directory: Directory, record: Record) -> int:
    """Where the member's bytes begin.

    Raises:
        SourceError: they are compressed or encrypted, its own header contradicts the directory, or they reach into it.
    """
    if record.unusable:
        raise SourceError(
            f"has the member {_shown(record.name)} {record.unusable}, which torch never writes",
            "write it by torch.save again, without repacking the archive",
        )
    if record.local + _LOCAL.size > directory.begin:
        raise _damaged(f"member {_shown(record.name)} begins at {record.local}, behind the last one")
    signature, *_, name_bytes, extra_bytes = _LOCAL.unpack(read_exactly(fd, _LOCAL.size, record.local))
    begin: int = record.local + _LOCAL.size + name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or begin + record.nbytes > directory.begin:
        raise _damaged(f"member {_shown(record.name)} is not at byte {record.local}")
    if read_exactly(fd, name_bytes, record.local + _LOCAL.size) != record.name:
        raise _damaged(f"another member than {_shown(record.name)} is at byte {record.local}")
    return begin


def _shown(name: bytes) -> str:
    return quoted(name.decode(errors="replace"))


def _damaged(problem: str) -> SourceError:
    return SourceError(f"is a damaged zip archive: {problem}", DOWNLOAD_AGAIN)


def _find(fd: int, file_bytes: int) -> tuple[int, int, int]:
    """Offset and bytes of the directory, and how many members it lists."""
    tail_bytes = min(file_bytes, _MAX_COMMENT_BYTES + _END.size + _END64_LOCATOR.size)
    tail_at = file_bytes - tail_bytes
    tail = read_exactly(fd, tail_bytes, tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > tail_bytes:
        raise SourceError("is a zip archive without its end: it is cut short", DOWNLOAD_AGAIN)
    _, disk, first_disk, here, count, nbytes, begin, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != tail_bytes:
        raise _damaged("bytes follow its end")
    end = tail_at + at
    locator_at = at - _END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, disk, end, disks = _END64_LOCATOR.unpack_from(tail, locator_at)
        first_disk = disks - 1 if disks else 0  # of a single part, some writers say none
        if end + _END64.size > tail_at + locator_at:
            raise _damaged("its zip64 record is not in front of its end")
        signature, *_, here, count, nbytes, begin = _END64.unpack(read_exactly(fd, _END64.size, end))
        if signature != b"PK\x06\x06":
            raise _damaged(f"no zip64 record is at byte {end}")
    if disk or first_disk or here != count:
        raise SourceError("is a part of a zip archive", "put its parts together")
    if begin + nbytes > end:
        raise _damaged(f"its directory of {nbytes} bytes at {begin} reaches behind byte {end}")
    if begin + nbytes < end:  # two archives of one length, one behind the other, would be read as the first
        raise _damaged(f"its directory ends at byte {begin + nbytes}, expected {end}")
    return begin, nbytes, count


def _entry(raw: bytes, at: int) -> tuple[Record, int]:
    """The entry at `at`, and where the next one begins."""
    if at + _ENTRY.size > len(raw) or raw[at : at + 4] != b"PK\x01\x02":
        raise _damaged(f"no member is listed at byte {at} of its directory")
    fields = _ENTRY.unpack_from(raw, at)
    flags, method, stored, nbytes = fields[3], fields[4], fields[8], fields[9]
    name_bytes, extra_bytes, comment_bytes, local = fields[10], fields[11], fields[12], fields[16]
    name_at = at + _ENTRY.size
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes + comment_bytes
    if end > len(raw):
        raise _damaged("its directory is cut short")
    name = raw[name_at:extra_at]
    if _SATURATED in (nbytes, stored, local):
        wide = _zip64(raw[extra_at : extra_at + extra_bytes])
        nbytes, stored, local = (next(wide, -1) if value == _SATURATED else value for value in (nbytes, stored, local))
        if min(nbytes, stored, local) < 0:
            raise _damaged(f"member {_shown(name)} lacks its zip64 sizes")
    unusable = "encrypted" if flags & _ENCRYPTED else "compressed" if method or stored != nbytes else ""
    return Record(name, local, nbytes, unusable), end


def _zip64(extra: bytes) -> Iterator[int]:
    """The 64-bit values of the extra field, of those that the entry has no room for (4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64_EXTRA:
            words = extra[at : at + nbytes]
            return (word for (word,) in struct.iter_unpack("<Q", words[: len(words) // 8 * 8]))
        at += nbytes
    return iter(())
