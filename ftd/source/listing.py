"""What lies in a model's directory and one level below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import os_reason
from ftd.source.wording import encodable, shown


@dataclass(frozen=True, slots=True)
class Listing:
    """Names only; nothing was opened.

    Attributes:
        root: the directory.
        files: relative posix paths of all that is no directory (links to nothing as well), sorted.
        directories: names of the directories, sorted; those with a leading dot and links to directories too,
            though their files are not in `files`.
        notes: what could not be listed.
    """

    root: Path
    files: tuple[str, ...]
    directories: tuple[str, ...]
    notes: tuple[str, ...]

    def top(self) -> Iterator[str]:
        """The files of the directory itself."""
        return (name for name in self.files if "/" not in name)


def list_directory(root: Path, *, below: bool) -> Listing:
    """`root`, and with `below` its subdirectories too (hidden and linked ones left out).

    Raises:
        OSError: `root` cannot be listed; of a subdirectory, that becomes a note.
    """
    files, directories, notes = _entries(root)
    visible = [name for name in directories if below and not name.startswith(".") and not (root / name).is_symlink()]
    for directory in visible:
        try:
            inner, _, inner_notes = _entries(root / directory)
        except OSError as error:
            notes.append(f"{shown(directory)}: not listed: {os_reason(error)}")
            continue
        files.extend(f"{directory}/{name}" for name in inner)
        notes.extend(inner_notes)
    return Listing(root, tuple(sorted(files)), tuple(sorted(directories)), tuple(notes))


def _entries(directory: Path) -> tuple[list[str], list[str], list[str]]:
    files: list[str] = []
    directories: list[str] = []
    notes: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not encodable([entry.name]):
                notes.append(f"{shown(entry.name)}: ignored, its name is not UTF-8")
            elif entry.is_dir():
                directories.append(entry.name)
            else:
                files.append(entry.name)
    return files, directories, notes
