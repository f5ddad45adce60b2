"""OP-01, OP-05: somebody removes or damages what a living daemon published. Status says exactly what, and nobody
takes the daemon's place by it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ftd_client
from ftd.errors import EXIT_ALREADY_RUNNING, EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK, FtdError, NoCreatorError
from ftd.shm.names import SHM_DIR
from ftd.shm.slots import SLOT_COUNT
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS
from tests.process.daemons import QUICK, Daemon, ftd, left_in, refused, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def path(namespace: str, tail: str) -> Path:
    return SHM_DIR / f"ftd.{namespace}.{tail}"


@pytest.mark.parametrize("tail", ["g1.0", "g1.manifest", "coord", "slots", "lock"])
def test_a_name_is_removed(start: Start, worker: Workers, namespace: str, model: Path, tail: str) -> None:
    """Status fails and names it; followers keep their weights; a stop leaves nothing."""
    daemon = start("--model", model, *QUICK)
    follower = worker()
    follower.do(workers.attach, namespace)
    path(namespace, tail).unlink()
    shown = ftd("status", "-n", namespace, "--json")
    assert (shown.status, shown.json["state"]) == (EXIT_FAILED, "failed")
    assert str(path(namespace, tail)) in shown.json["failure"]["message"]
    assert "gone" in shown.json["failure"]["message"] and shown.json["failure"]["remedy"]
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    if tail == "coord":  # what its second thread looks at
        follower.do(workers.wait_beats, namespace, 2)
    assert follower.do(workers.lost, namespace) == [], "its creator lives"
    assert ftd("stop", "-n", namespace).status == EXIT_OK
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == []
    assert follower.do(workers.wait_lost, namespace)[0] == "stopped"


def test_all_names_are_removed(start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
    """What logind's RemoveIPC does: the socket alone tells that a daemon lives."""
    daemon = start("--model", model)
    for file in SHM_DIR.glob(f"ftd.{namespace}.*"):
        file.unlink()
    shown = ftd("status", "-n", namespace, "--json")
    assert (shown.status, shown.json["state"]) == (EXIT_FAILED, "failed")
    assert f"{runtime_dir}/{namespace}.sock" in shown.json["failure"]["message"]
    assert shown.json["model"]["tensors"] == 4
    with pytest.raises(NoCreatorError, match="its segments are not visible"):
        ftd_client.attach(namespace, timeout=0)
    refused(ftd("start", "-n", namespace, "--model", model), EXIT_ALREADY_RUNNING, f"pid {daemon.pid}")
    assert segments(namespace) == []
    assert ftd("stop", "-n", namespace).status == EXIT_OK
    assert daemon.ended() == EXIT_OK
    assert ftd("status", "-n", namespace).status == EXIT_NOT_RUNNING
    assert left_in(runtime_dir) == []


def test_a_stranger_in_the_place(start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
    """All names are gone and a second daemon has come from elsewhere: the first one's end touches nothing of it."""
    first = start("--model", model, *QUICK)
    for file in SHM_DIR.glob(f"ftd.{namespace}.*"):
        file.unlink()
    with tempfile.TemporaryDirectory(prefix="ftd-") as other:
        second = start("--model", model, *QUICK, environ={"FTD_RUNTIME_DIR": other})
        before = {name: path(namespace, name).stat().st_ino for name in segments(namespace)}
        assert first.terminate() == EXIT_OK
        assert {name: path(namespace, name).stat().st_ino for name in segments(namespace)} == before
        assert second.status()["state"] == "ready"
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert set(weights.state_dict()) == set(TINY_DIGESTS)
        assert second.terminate() == EXIT_OK
    assert segments(namespace) == []


def test_the_lock_alone_is_removed(start: Start, namespace: str, model: Path) -> None:
    """SH-06: a start that can take the lock's name still sees who lives, and changes nothing."""
    daemon = start("--model", model)
    before = segments(namespace)
    path(namespace, "lock").unlink()
    refused(ftd("start", "-n", namespace, "--model", model), EXIT_ALREADY_RUNNING, f"pid {daemon.pid}")
    with tempfile.TemporaryDirectory(prefix="ftd-") as other:
        elsewhere = {"FTD_RUNTIME_DIR": other}
        refused(ftd("start", "-n", namespace, "--model", model, environ=elsewhere), EXIT_ALREADY_RUNNING)
    assert segments(namespace) == [name for name in before if name != "lock"]
    with ftd_client.attach(namespace, timeout=0) as weights:
        assert set(weights.state_dict()) == set(TINY_DIGESTS)
    path(namespace, "lock").touch()
    shown = ftd("status", "-n", namespace, "--json")
    assert shown.status == EXIT_FAILED and "not the one that the daemon holds" in shown.json["failure"]["message"]
    assert daemon.terminate() == EXIT_OK
    assert segments(namespace) == []


@pytest.mark.parametrize("tail", ["g1.0", "coord"])
def test_a_name_leads_elsewhere(start: Start, namespace: str, model: Path, tail: str) -> None:
    """SH-13: the same name and bytes, but another file: nobody is fooled."""
    daemon = start("--model", model)
    file = path(namespace, tail)
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)
    shown = ftd("status", "-n", namespace, "--json")
    assert (shown.status, shown.json["state"]) == (EXIT_FAILED, "failed")
    assert str(file) in shown.json["failure"]["message"]
    with pytest.raises(FtdError):
        ftd_client.attach(namespace, timeout=1)
    assert daemon.terminate() == EXIT_OK
    assert segments(namespace) == []


class TestDamage:
    """Bytes that are not what was published: refused by status and attach alike."""

    @pytest.mark.parametrize("at", [-1])
    def test_of_the_manifest(self, start: Start, namespace: str, model: Path, at: int) -> None:
        start("--model", model)
        file = path(namespace, "g1.manifest")
        data = bytearray(file.read_bytes())
        data[at] ^= 0xFF
        with file.open("r+b") as handle:
            handle.write(data)
        shown = ftd("status", "-n", namespace, "--json")
        assert shown.status == EXIT_FAILED and shown.json["state"] == "failed"
        assert str(file) in shown.json["failure"]["message"] and "checksum" in shown.json["failure"]["message"]
        with pytest.raises(FtdError, match="checksum differs"):
            ftd_client.attach(namespace, timeout=5)

    @pytest.mark.parametrize(("tail", "change"), [("g1.0", -1), ("g1.manifest", 1)])
    def test_of_a_length(self, start: Start, namespace: str, model: Path, tail: str, change: int) -> None:
        """SH-16: a segment that was cut or grew, under the same inode."""
        start("--model", model)
        file = path(namespace, tail)
        os.truncate(file, file.stat().st_size + change)
        shown = ftd("status", "-n", namespace, "--json")
        assert shown.status == EXIT_FAILED and str(file) in shown.json["failure"]["message"]
        with pytest.raises(FtdError, match=tail.replace(".", r"\.")):
            ftd_client.attach(namespace, timeout=5)

    def test_of_the_coordination_block(self, start: Start, namespace: str, model: Path) -> None:
        """Both copies of the record: nothing can be read, but the lock tells that somebody lives."""
        daemon = start("--model", model)
        daemon.freeze()  # the next heartbeat would heal it
        file = path(namespace, "coord")
        with file.open("r+b") as handle:
            handle.write(os.urandom(4096))
        assert ftd("status", "-n", namespace).status == EXIT_FAILED
        refused(ftd("start", "-n", namespace, "--model", model), EXIT_ALREADY_RUNNING)
        with pytest.raises(FtdError):
            ftd_client.attach(namespace, timeout=1)
        daemon.thaw()

    def test_of_a_slot(self, start: Start, worker: Workers, namespace: str, model: Path) -> None:
        """What followers write is never trusted: rubbish in their slots is a follower that nobody knows."""
        daemon = start("--model", model)
        follower = worker()
        follower.do(workers.attach, namespace)
        follower.freeze()
        with path(namespace, "slots").open("r+b") as handle:
            handle.seek(4096)
            handle.write(os.urandom(SLOT_COUNT * 512))
        shown = daemon.status()
        assert shown["state"] == "ready"
        assert [(row["pid"], row["state"]) for row in shown["followers"]] == [(None, "unknown")]
        follower.thaw()
        wait_for("its next heartbeat", lambda: [row["pid"] for row in daemon.status()["followers"]] == [follower.pid])
