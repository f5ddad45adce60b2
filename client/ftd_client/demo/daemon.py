"""The demo's daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from ftd.errors import FtdError
from ftd.shm.names import listed
from ftd_client.demo import report
from ftd_client.demo.commands import ftd_command, ftd_facts
from ftd_client.demo.interrupts import Interrupts


class Daemon:
    """`ftd start --detach` in a namespace and a runtime directory of the demo's own.

    Stopped when the body fails, by force if need be, and also when it fails to start or is interrupted there.
    """

    def __init__(self, namespace: str, model: Path, environ: Mapping[str, str], interrupts: Interrupts) -> None:
        self._namespace = namespace
        self._model = model
        self._environ = environ
        self._interrupts = interrupts
        self._stopped = False
        self.pid = 0

    def __enter__(self) -> Daemon:
        try:
            self._command("start", "--model", str(self._model), "--detach")
            self.pid = int(ftd_facts(self._namespace, self._environ)["pid"])
        except BaseException:
            self._stop_by_force()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stopped:
            self._stop_by_force()

    def show_status(self) -> None:
        self._command("status")

    def stop(self) -> None:
        self._command("stop")
        self._stopped = True

    def _command(self, name: str, *arguments: str) -> None:
        report.command(["ftd", name, "-n", self._namespace, *arguments])
        ftd_command([name, "-n", self._namespace, *arguments], self._environ, self._interrupts)

    def _stop_by_force(self) -> None:
        # fails where there is nothing to stop; what stays is what the message is for
        with contextlib.suppress(FtdError):
            ftd_command(["stop", "-n", self._namespace, "--force"], self._environ, None)
        left = [name.name for name in listed(self._namespace)]
        if left:
            report.warning(
                f"left in /dev/shm: {', '.join(left)}; remove it with: ftd stop -n {self._namespace} --force"
            )
