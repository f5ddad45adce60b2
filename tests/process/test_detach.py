"""The parent of a detached daemon: what it imports, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from ftd.errors import EXIT_FAILED, EXIT_OK
from tests.process.checkpoints import hollow
from tests.process.daemons import PATIENCE_S, Daemon, ftd, listens, segments, wait_for

Start = Callable[..., Daemon]


def test_nothing_is_imported_from_the_working_directory(
    namespace: str, runtime_dir: Path, model: Path, tmp_path: Path
) -> None:
    """In a directory that others may write, a package of theirs would run as this user."""
    (tmp_path / "click").mkdir()
    (tmp_path / "click" / "__init__.py").write_text("raise SystemExit('a stranger was imported')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ftd", "start", "-n", namespace, "--model", str(model), "--detach"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, "stranger" in done.stderr) == (EXIT_OK, False), done.stderr
    assert ftd("stop", "-n", namespace).status == EXIT_OK


def test_a_second_signal_ends_the_wait_for_a_daemon_that_does_not_end(
    namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "ftd", "start", "-n", namespace, "--model", str(hollow(tmp_path, 96)), "--detach"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        (child,) = wait_for("the daemon's process", psutil.Process(parent.pid).children)
        wait_for("its handlers", lambda: listens(child.pid))  # before exec it would stand in the parent's way
        child.suspend()
        parent.send_signal(signal.SIGINT)
        wait_for("the request to be passed on", lambda: signal.SIGTERM in _pending(child.pid))
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=PATIENCE_S)
        assert parent.returncode == EXIT_FAILED
        assert f"ftd: the daemon (pid {child.pid}) did not end after SIGINT and was killed" in said
        wait_for("the daemon's end", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        ftd("stop", "-n", namespace, "--force")
        assert segments(namespace) == []
    finally:
        parent.kill()
        parent.wait()


def _pending(pid: int) -> set[int]:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(rows["ShdPnd"], 16) | int(rows["SigPnd"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
