from pathlib import Path

import pytest

from ftd.mounts import Mount, mounts

TABLE = """\
22 1 0:21 / /proc rw,nosuid - proc proc rw
31 1 0:27 / /dev/shm rw,relatime shared:5 master:7 - tmpfs tmpfs rw,size=64m,huge=advise
44 1 259:1 /a/b /mnt/with\\040space ro - ext4 /dev/nvme0n1p1 rw
"""


def test_the_kernels_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of optional fields stands before the separator."""
    monkeypatch.setattr(Path, "read_text", lambda self, errors: TABLE)
    assert mounts() == [
        Mount("0:21", "/proc", "proc", ("rw",)),
        Mount("0:27", "/dev/shm", "tmpfs", ("rw", "size=64m", "huge=advise")),
        Mount("259:1", "/mnt/with\\040space", "ext4", ("rw",)),
    ]


def test_this_host() -> None:
    assert {mount.kind for mount in mounts() if mount.path == "/proc"} == {"proc"}


def test_without_a_table_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, errors: str) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refused)
    assert mounts() == []
