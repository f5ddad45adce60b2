import concurrent.futures.thread  # noqa: F401  (nobody may be kept from this interpreter's files)
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftd.clock import NS, monotonic_ns
from ftd.daemon import status
from ftd.daemon.status import exit_status, find_socket, report, report_all
from ftd.daemon.table import print_list, print_one
from ftd.errors import EXIT_OK, AccessError
from ftd.owner import Owner
from ftd.shm import slots
from ftd.shm.coord import CoordRecord, CoordWriter
from ftd.shm.life import LifeLock
from ftd.shm.names import Names
from ftd.shm.segment import Access, path_of
from ftd.shm.state import State
from tests.conftest import NOBODY

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]


@pytest.fixture
def first() -> CoordRecord:
    now = monotonic_ns()
    return CoordRecord(Owner.current(), State.LOADING, 0, now, NS, 60 * NS, now, "/nowhere/a.sock")


def _ours(names: Names) -> dict[str, Any]:
    return next(row for row in report_all(os.environ) if row["namespace"] == names.namespace)


def test_a_namespace_that_this_user_may_not_look_at_is_listed_and_not_judged(
    names: Names, first: CoordRecord, runtime_dir: Path, in_child: InChild, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose health check would fail for what is another's, and may be well?"""
    coord = CoordWriter(names, Access(0o640), first)
    row = in_child(lambda: _ours(names), uid=NOBODY)
    assert (row["state"], row["failure"]) == (None, None)
    assert "coord may not be opened by" in row["warnings"][0] and "mode 0640" in row["warnings"][0]
    assert exit_status([row], one=False) == EXIT_OK
    assert set(row) == set(_ours(names))
    with pytest.raises(AccessError):
        in_child(lambda: report(names.namespace, os.environ), uid=NOBODY)
    print_list([row])
    assert f"{names.namespace}: warning: " in capsys.readouterr().out
    coord.close()


def test_files_of_others_are_a_warning(names: Names, first: CoordRecord, runtime_dir: Path, in_child: InChild) -> None:
    in_child(lambda: path_of(names.weights(99, 0)).touch(), uid=NOBODY)
    with LifeLock.acquire(names):
        slots.prepare(names, Access())
        coord = CoordWriter(names, Access(), first)
        shown = report(names.namespace, os.environ)
        assert (shown["state"], shown["failure"]) == ("loading", None)
        assert names.weights(99, 0) in shown["warnings"][-1] and "not of this namespace" in shown["warnings"][-1]
        coord.close()
    assert "not of this namespace" in report(names.namespace, os.environ)["warnings"][-1]


#: As `control.describe` makes it of a generation.
ANSWER = {
    "stage": None,
    "fingerprint": "f",
    "model": {"source": "/m", "tensors": 1, "bytes": 0, "dtypes": {"F32": 0}, "digest": None},
    "segments": [],
    "pin": "none",
    "push": [{"gpu": "GPU-0", "pushed_bytes": 0, "clients": 0}],
    "push_obstacle": None,
    "warnings": ["a warning of the daemon"],
    "versions": {"ftd": "0.1.0", "protocol": "1.0", "torch": None},
}
SEGMENT = {"name": "", "bytes": 0, "inode": 1, "page_bytes": 4096, "huge_bytes": 0, "pinned_bytes": 0, "node_bytes": {}}


@pytest.fixture
def answering(names: Names, first: CoordRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """`answering(answer)`: the status of a living creator whose socket gives that answer."""
    coord = CoordWriter(names, Access(), first)
    coord.publish(1, 10, bytes(16))

    def ask(answer: Any) -> dict[str, Any]:
        monkeypatch.setattr(status, "call", lambda *_: answer)
        return report(names.namespace, os.environ)

    yield ask
    coord.close()


def test_what_the_daemon_tells_is_shown(
    names: Names, answering: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answering({**ANSWER, "segments": [{**SEGMENT, "name": names.weights(1, 0)}], "pid": 1, "state": "ready"})
    assert (shown["model"], shown["warnings"], shown["pid"]) == (ANSWER["model"], ANSWER["warnings"], os.getpid())
    assert f"{names.weights(1, 0)} is gone" in shown["failure"]["message"]
    print_one(shown)
    assert names.weights(1, 0) in capsys.readouterr().out


def test_shares_are_rounded_down_and_nodes_shown_where_asked_for(
    names: Names, answering: Callable[[Any], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    got = {"bytes": 2000, "huge_bytes": 1999, "pinned_bytes": 2000, "page_bytes": 2 << 20}
    segment = {**SEGMENT, **got, "name": names.weights(1, 0)}
    print_one(answering({**ANSWER, "segments": [{**segment}]}))
    plain = capsys.readouterr().out
    assert "99 %" in plain and "100 %" in plain and "NODES" not in plain
    print_one(answering({**ANSWER, "segments": [{**segment, "node_bytes": {"0": 1500, "1": 500}}]}))
    assert "0: 75 %, 1: 25 %" in capsys.readouterr().out


def test_nodes_that_hold_no_number_are_no_answer(names: Names, answering: Callable[[Any], Any]) -> None:
    segment = {**SEGMENT, "name": names.weights(1, 0), "node_bytes": {"0": "all"}}
    assert answering({**ANSWER, "segments": [segment]})["failure"]["code"] == "control"


@pytest.mark.parametrize(
    "wrong",
    [
        {"segments": 7}, {"segments": [7]}, {"segments": [{"name": "/x"}]}, {"segments": [{**SEGMENT, "name": "/x"}]},
        {"segments": [{**SEGMENT, "name": "/../../etc/passwd"}]}, {"segments": [{**SEGMENT, "name": "/ftd.b.g1.0"}]},
        {"model": {}}, {"model": {**ANSWER["model"], "bytes": "1"}},
        {"model": {**ANSWER["model"], "dtypes": {"x": -1}}},
        {"model": {**ANSWER["model"], "digest": 7}},
        {"warnings": None}, {"warnings": [1]}, {"versions": {}}, {"pin": 1}, {"fingerprint": b"f"},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_is_none_is_no_crash(answering: Callable[[Any], Any], wrong: dict[str, Any]) -> None:
    """Anybody may keep a namespace and answer what he likes to root, who lists them all."""
    shown = answering({**ANSWER, **wrong})
    assert (shown["state"], shown["failure"]["code"]) == ("hung", "control")
    assert f"no usable answer to status: {next(iter(wrong))} missing or of another type" in shown["failure"]["message"]


def test_a_socket_behind_a_closed_door_is_none(first: CoordRecord, tmp_path: Path, in_child: InChild) -> None:
    """The daemon of another user may have its socket in a directory that only he may search."""
    (tmp_path / "closed").mkdir(0o700)
    said = tmp_path / "closed" / "a.sock"
    said.touch()
    record = replace(first, socket=str(said))
    assert find_socket(record, {}) == said
    assert in_child(lambda: find_socket(record, {}), uid=NOBODY) == said


@pytest.mark.parametrize("socket", ["/" + "x" * 5000, "a\0b", ""])
def test_a_socket_that_cannot_be_is_none(first: CoordRecord, socket: str) -> None:
    assert find_socket(replace(first, socket=socket), {}) == Path(socket)
