"""Fixtures of tests with real processes. Whatever a test does, no process and no segment may stay."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.checkpoints import tiny
from tests.process.cuda_host import CudaHost
from tests.process.daemons import Daemon, wait_for
from tests.process.workers import Worker

#: Begins every namespace of this run, see the fixture `namespace`.
_OURS = f"t{os.getpid()}-"


@pytest.fixture(scope="session", autouse=True)
def nothing_stays() -> Iterator[None]:
    """At the end of all tests: no process of theirs, and no segment."""
    yield
    names = sorted(path.name for path in Path("/dev/shm").glob(f"ftd.{_OURS}*"))
    assert not names, f"left: {names}"
    # a detached daemon that was stopped ends a moment after it has let go of its namespace
    wait_for("the end of all processes", lambda: not any(_OURS in words for _, words in _command_lines()))


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children() -> Iterator[None]:
    """What nohup or a shell's `&` lets this run ignore daemons would ignore too: here it is only unheard."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def _command_lines() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield entry.name, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of about a kilobyte; tests that change it make their own."""
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def open_model() -> Iterator[Path]:
    """The same, where every user may read it; pytest's own directories are closed to others."""
    with tempfile.TemporaryDirectory(prefix="ftd-model-") as directory:
        path = tiny(Path(directory))
        path.chmod(0o755)
        yield path


@pytest.fixture
def start(namespace: str, runtime_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """`start(*arguments, wait=True, environ=None)`: a daemon of `namespace`; an orderly stop ends it."""
    stack = contextlib.ExitStack()

    def begin(*arguments: str | Path, wait: bool = True, environ: dict[str, str] | None = None) -> Daemon:
        daemon = stack.enter_context(Daemon(namespace, *arguments, environ=environ))
        if wait:
            daemon.wait_ready()
        return daemon

    with stack:
        yield begin


@pytest.fixture
def worker() -> Iterator[Callable[[], Worker]]:
    """`worker()`: a process that does what it is told."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Worker())


@pytest.fixture(scope="session")
def cuda_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaHost]:
    host = CudaHost(tmp_path_factory.mktemp("cuda"))
    yield host
    host.worker.end()


@pytest.fixture
def cuda_host(cuda_process: CudaHost, runtime_dir: Path) -> Iterator[CudaHost]:
    """A host with a GPU that does all it is asked for, until it is told otherwise. Ends after the daemons of `start`
    when it is asked for before that."""
    cuda_process.daemon.forget()
    cuda_process.follower.forget()
    yield cuda_process
    cuda_process.check()
