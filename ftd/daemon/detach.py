"""`ftd start --detach`: starts the daemon as a session of its own and returns once its namespace is ready.

The daemon reports to its parent as it would to systemd: this is the other end of sd_notify. Its log goes to
`<runtime directory>/<namespace>.log`, which the daemon empties once it has the namespace and removes when it was
stopped in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import click

from ftd import rundir
from ftd.clock import Deadline
from ftd.daemon.logs import DETACHED_LOG
from ftd.daemon.notify import NotifyListener, reported_error, without_manager
from ftd.daemon.signals import StopSignals
from ftd.errors import FtdError, InternalError, RuntimeDirError, StopTimeoutError, os_reason

_POLL_S = 0.1
#: From SIGTERM to SIGKILL: a daemon that is well ends within a request of its loader.
_TERMINATE_S = 30.0
_PERCENT = re.compile(r"(\d+) %")


def start_detached(arguments: Sequence[str], namespace: str, environ: Mapping[str, str], signals: StopSignals) -> None:
    """Starts `ftd <arguments>` in the background and waits for READY.

    A signal to the parent while it waits ends the daemon too.

    Raises:
        FtdError: the daemon's own error, as it reported it.
    """
    log_path = rundir.daemon_dir(environ) / f"{namespace}.log"
    with NotifyListener() as listener, _open_log(log_path) as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ftd", *arguments],  # -P: nothing is imported from the working directory
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**without_manager(environ), "NOTIFY_SOCKET": listener.address, DETACHED_LOG: str(log_path)},
            start_new_session=True,
        )
        ready = _wait(child, namespace, listener, signals)
    if ready:
        click.echo(f"{namespace}: {ready} (pid {child.pid}, log {log_path})")


def _wait(child: subprocess.Popen[bytes], namespace: str, listener: NotifyListener, signals: StopSignals) -> str | None:
    """The text that came with READY; None where a signal ended the wait.

    Raises:
        FtdError: the daemon ended before it was ready.
        StopTimeoutError: it did not end when it was told to, or somebody asked twice; it was killed.
    """
    error: FtdError | None = None
    asked: Deadline | None = None
    with _progress() as show:
        while True:
            if signals.received and asked is None:
                child.terminate()
                asked = Deadline.after(_TERMINATE_S)
            if asked is not None and (signals.count > 1 or asked.expired()):
                child.kill()
                raise StopTimeoutError(
                    f"the daemon (pid {child.pid}) did not end after {signals.received} and was killed",
                    f"ftd stop --namespace {namespace} --force removes what it left",
                )
            fields = listener.receive(_POLL_S)
            if fields is None and child.poll() is not None and (fields := listener.receive(0)) is None:
                break
            fields = fields or {}
            error = reported_error(fields) or error
            if fields.get("READY") == "1" and not signals.received:
                return fields.get("STATUS", "ready")
            if "STATUS" in fields and error is None:
                show(fields["STATUS"])
    if error is not None:
        raise error
    if child.returncode == 0 or asked is not None:
        return None
    raise InternalError(
        f"the daemon ended with status {child.returncode} before it was ready", "see the log in the runtime directory"
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the daemon's status texts: a bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        said = [""]

        def line(text: str) -> None:
            if said[-1] != text:
                said.append(text)
                click.echo(text, err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=100)

        def move(text: str) -> None:
            match = _PERCENT.search(text)
            bar.update(task, description=text, completed=int(match[1]) if match else None)

        yield move


def _open_log(path: Path) -> IO[bytes]:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RuntimeDirError(f"the log {path} cannot be written: {os_reason(error)}", "set FTD_RUNTIME_DIR") from None
    return os.fdopen(fd, "wb")
