from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import RuntimeDirError
from ftd.mutex import mutex
from tests.conftest import kill


def test_it_is_free_again_after_the_body_even_when_that_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), mutex(tmp_path / "x.mutex"):
        raise KeyError
    with mutex(tmp_path / "x.mutex", timeout_s=0):
        pass


def test_a_held_one_is_refused_in_bounded_time_and_free_once_its_holder_is_killed(
    tmp_path: Path, standing: Callable[[Callable[[], Any]], int]
) -> None:
    path = tmp_path / "x.mutex"
    kept = []

    def hold() -> None:
        kept.append(mutex(path))
        kept[0].__enter__()

    pid = standing(hold)
    with (
        pytest.raises(RuntimeDirError, match="is held by another process: expected it free within 0 s"),
        mutex(path, 0),
    ):
        pass
    kill(pid)
    with mutex(path, timeout_s=0):
        pass


def test_a_place_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeDirError, match="cannot be locked") as raised, mutex(tmp_path / "file" / "x.mutex"):
        pass
    assert "FTD_RUNTIME_DIR" in raised.value.remedy


def test_nobody_else_may_open_it(tmp_path: Path) -> None:
    with mutex(tmp_path / "x.mutex"):
        assert (tmp_path / "x.mutex").stat().st_mode & 0o777 == 0o600
