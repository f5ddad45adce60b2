"""The benchmark's harness: what hangs or dies becomes a row in a bounded time, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.child import ROOT, Child, Skip, failed_to_meet, measure, meet
from tests.process.daemons import wait_for

HERE = "tests.process.test_bench"
SHM = Path("/dev/shm")


def answers(value: int) -> dict[str, int]:
    print("noise without an end of line", end="")
    return {"value": value}


def fails() -> None:
    raise ValueError("found 1, expected 2\n  → a remedy")


def skips() -> None:
    raise Skip("no such thing here")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_with_a_child(pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def meets() -> dict[str, float]:
    meet()
    return {"at": time.monotonic()}


def test_what_a_function_returned_raised_or_could_not_measure() -> None:
    assert measure(f"{HERE}:answers", most_s=60, value=7) == {"value": 7}
    assert measure(f"{HERE}:fails", most_s=60) == {"error": "ValueError: found 1, expected 2"}
    assert measure(f"{HERE}:skips", most_s=60) == {"skipped": "no such thing here"}
    assert measure(f"{HERE}:dies", most_s=60) == {"error": "exit status -9"}


def test_one_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begun = time.monotonic()
    found = measure(f"{HERE}:hangs_with_a_child", most_s=5, pid_file=str(pid_file))
    assert found == {"error": "took more than 5 s"}
    assert time.monotonic() - begun < 30
    wait_for("the grandchild ends", lambda: not _runs(int(pid_file.read_text())))


def test_none_goes_on_before_all_have_met() -> None:
    with Child(f"{HERE}:meets", most_s=60) as one, Child(f"{HERE}:meets", most_s=60) as other:
        assert failed_to_meet([one, other]) is None
        begun = time.monotonic()
        for child in (one, other):
            child.go()
        assert min(one.result()["at"], other.result()["at"]) >= begun


def test_one_that_never_meets_is_told_by_its_failure() -> None:
    with Child(f"{HERE}:meets", most_s=60) as one, Child(f"{HERE}:fails", most_s=60) as other:
        assert failed_to_meet([one, other]) == {"error": "ValueError: found 1, expected 2"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_leaves_no_daemon_no_segment_and_no_file(
    number: signal.Signals, runtime_dir: Path, tmp_path: Path
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.bench", "--size-gib", "0.02", "--only", "attach", "--pages", "4k",
         "--rows", "heartbeats", "--device", "cpu", "--folder", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    namespace = f"ftd.bench-{run.pid}"
    try:
        wait_for("the daemon publishes", lambda: (SHM / f"{namespace}.g1.manifest").exists() or run.poll() is not None)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + number, said
    assert not list(SHM.glob(f"{namespace}*"))
    assert not list(tmp_path.iterdir())


def test_a_run_measures_and_writes_what_it_found(runtime_dir: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--size-gib", "0.02", "--only", "load", "--pages", "4k",
         "--rows", "ftd,torch_mmap", "--device", "cpu", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    lines = done.stdout.splitlines()
    for name in ("host memcpy", "ftd, 4 KiB pages: first", "ftd, 4 KiB pages: second", "torch_mmap"):
        (found,) = [line for line in lines if line.startswith(f"| {name}")]
        assert "GB/s" in found
    assert (tmp_path / "plot.svg").exists()


def _runs(pid: int) -> bool:
    """Not a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
