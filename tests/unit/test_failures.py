"""The records of failed starts."""

import contextlib
import json
import logging
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ftd import clock, failures, owner
from ftd.errors import MemoryShortError
from ftd.failures import Failure
from tests.conftest import mode_of


def failure(namespace: str = "ns", **changes: object) -> Failure:
    made = Failure.of(namespace, MemoryShortError("8 GiB needed, 1 GiB free in /dev/shm", "free some"))
    return replace(made, **changes)


def test_a_failure_is_of_this_process_and_now() -> None:
    begun_ns = clock.monotonic_ns()
    made = failure()
    assert made.to_dict() == {
        "code": "memory",
        "message": "8 GiB needed, 1 GiB free in /dev/shm",
        "remedy": "free some",
    }
    assert (made.exit_status, made.pid, made.boot_id) == (6, os.getpid(), owner.boot_id().hex())
    assert made.is_after(begun_ns)
    assert not made.is_after(clock.monotonic_ns())
    assert not replace(made, boot_id="00" * 16).is_after(begun_ns)


def test_a_record_round_trips_and_is_removed(tmp_path: Path, umask: None) -> None:
    made = failure(message="cannot read /models/\udcff.bin")
    assert failures.write_failure(tmp_path, made)
    assert [path.name for path in tmp_path.iterdir()] == ["ns.failed.json"]
    assert mode_of(tmp_path / "ns.failed.json") == 0o644
    assert failures.read_failure([tmp_path], "ns") == made
    failures.remove_failure([tmp_path, tmp_path / "missing"], "ns")
    assert list(tmp_path.iterdir()) == []
    assert failures.read_failure([tmp_path], "ns") is None


def test_a_record_replaces_the_one_before(tmp_path: Path) -> None:
    failures.write_failure(tmp_path, failure(message="first"))
    failures.write_failure(tmp_path, failure(message="second"))
    found = failures.read_failure([tmp_path], "ns")
    assert found is not None
    assert found.message == "second"


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_the_latest_of_this_boot_wins_whatever_the_wall_clock_says(tmp_path: Path, newest: int) -> None:
    directories = [tmp_path / str(index) for index in range(3)]
    for index, directory in enumerate(directories):
        directory.mkdir()
        at_ns = 2_000 if index == newest else 1_000
        failures.write_failure(directory, failure(message=str(index), failed_at_ns=at_ns, wall_s=9e9 - at_ns))
    (tmp_path / "old").mkdir()
    old = failure(message="of another boot", boot_id="00" * 16, failed_at_ns=10**18, wall_s=9e9)
    failures.write_failure(tmp_path / "old", old)
    found = failures.read_failure([*directories, tmp_path / "old", tmp_path / "missing"], "ns")
    assert found is not None
    assert found.message == str(newest)


def test_earlier_boots_are_ordered_by_the_wall_clock(tmp_path: Path) -> None:
    for name, at_ns, wall_s in (("a", 10, 2_000.0), ("b", 20, 1_000.0)):
        (tmp_path / name).mkdir()
        old = failure(message=name, boot_id=name * 32, failed_at_ns=at_ns, wall_s=wall_s)
        failures.write_failure(tmp_path / name, old)
    found = failures.read_failure([tmp_path / "a", tmp_path / "b"], "ns")
    assert found is not None
    assert found.message == "a"


def test_a_record_of_a_newer_release_may_say_more(tmp_path: Path) -> None:
    made = failure()
    (tmp_path / "ns.failed.json").write_text(json.dumps(asdict(made) | {"generation": 3}))
    assert failures.read_failure([tmp_path], "ns") == made


def _whole() -> str:
    return json.dumps(asdict(failure()))


BROKEN = {
    "empty": "",
    "half": _whole()[:40],
    "list": "[]",
    "text": "gone wrong",
    "missing-field": json.dumps({**asdict(failure()), "remedy": None}),
    "boolean-status": json.dumps({**asdict(failure()), "exit_status": True}),
    "no-finite-time": json.dumps({**asdict(failure()), "wall_s": float("nan")}),
    "other-namespace": json.dumps(asdict(failure("other"))),
    "too-large": json.dumps(asdict(failure(message="x" * failures.MAX_FAILURE_BYTES))),
    "deep": "[" * 60_000,
    "no-utf8": "\udcff",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_record_is_skipped_with_a_log_line_and_overwritten(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ns.failed.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert failures.read_failure([tmp_path], "ns") is None
    assert "ns.failed.json is no failure record and is ignored" in caplog.text
    assert failures.failed_namespaces([tmp_path]) == []
    made = failure()
    assert failures.write_failure(tmp_path, made)
    assert failures.read_failure([tmp_path], "ns") == made


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.with_name("elsewhere").write_text(_whole())
    path.symlink_to(path.with_name("elsewhere"))


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _link, _directory])
def test_what_is_no_file_is_skipped_at_once(tmp_path: Path, make: object) -> None:
    make(tmp_path / "ns.failed.json")
    assert failures.read_failure([tmp_path], "ns") is None


def test_what_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ns.failed.json").mkdir()
    failures.remove_failure([tmp_path], "ns")
    assert "ns.failed.json cannot be removed: is a directory" in caplog.text


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes: what write(2) meets at the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = failure(message="before")
    failures.write_failure(tmp_path, before)
    with full_disk():
        written = failures.write_failure(tmp_path, failure(message="after"))
    assert not written
    assert "ns.failed.json cannot be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["ns.failed.json"]
    assert failures.read_failure([tmp_path], "ns") == before


def test_a_missing_directory_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    assert not failures.write_failure(tmp_path / "missing", failure())


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".ns.failed.json.{os.getpid()}").symlink_to("precious")
    assert failures.write_failure(tmp_path, failure())
    assert (tmp_path / "precious").read_text() == "precious"


def test_namespaces_with_a_record_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for name in ("a", "b", "tmp"):
        (tmp_path / name).mkdir()
    for directory, namespace in (("a", "x-1"), ("b", "x-1"), ("b", "a.b")):
        failures.write_failure(tmp_path / directory, failure(namespace))
    (tmp_path / "a" / "half.failed.json").write_text("{")
    (tmp_path / "a" / "renamed.failed.json").write_text(_whole())
    (tmp_path / "a" / "x-1.sock.lock").touch()
    directories = [tmp_path / "a", tmp_path / "missing", tmp_path / "b"]
    assert failures.failed_namespaces(directories) == ["a.b", "x-1"]
