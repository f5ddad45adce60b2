"""Whether the GPUs on which this process has contexts still answer.

A GPU goes away from under a running process: it falls off the bus, its context is broken by an error that stays, or
a container loses its device nodes. Nothing says so before the next call is refused, and the daemon makes one only when
it is asked for a push. So it is asked for.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from ftd.clock import NS, monotonic_ns
from ftd.cuda.runtime import CudaError, CudaRuntime, gpu_name
from ftd.units import format_seconds

log = logging.getLogger("ftd")

#: As often as the heart beats; a question is three short calls.
_ASK_EVERY_S = 1.0
#: A driver that is stuck answers nothing: a reset takes it a few seconds.
_SILENT_S = 15.0


class Gpus:
    """Asks each GPU in a thread of its own, which only records: a driver may never answer. The loop looks and logs.

    Args:
        every_s: between two questions.
        silent_s: a question that old counts as refused.
    """

    def __init__(self, *, every_s: float = _ASK_EVERY_S, silent_s: float = _SILENT_S) -> None:
        self._every_s, self._silent_s = every_s, silent_s
        self._watched: dict[bytes, _Watch] = {}
        self._told: dict[bytes, str] = {}
        self._ended = threading.Event()

    def watch(self, cuda: CudaRuntime, ordinal: int) -> None:
        """Of a GPU that has a context of this process, which asking would else make."""
        with suppress(CudaError):
            gpu = cuda.device_uuid(ordinal)
            if gpu not in self._watched:
                self._watched[gpu] = _Watch(cuda, ordinal, self._every_s, self._ended)

    def lost(self) -> dict[bytes, str]:
        """UUID → why, of those that do not answer now. They may again: nothing is remembered."""
        since_ns = monotonic_ns() - int(self._silent_s * NS)
        found = {}
        for gpu, watch in self._watched.items():
            asked_ns = watch.asked_ns
            if watch.refusal:
                found[gpu] = watch.refusal
            elif asked_ns and asked_ns < since_ns:
                found[gpu] = f"no answer for {format_seconds((monotonic_ns() - asked_ns) / NS)}"
        return found

    @property
    def all_lost(self) -> str | None:
        """Why, where none of those that are watched answers; None where one does, or none is watched."""
        lost = self.lost()
        return next(iter(lost.values())) if lost and len(lost) == len(self._watched) else None

    @property
    def warnings(self) -> list[str]:
        return [
            f"{gpu_name(gpu)} is lost: {why}. The weights stay served, and followers pull; restart the daemon once it"
            " is back"
            for gpu, why in self.lost().items()
        ]

    def log_changes(self) -> None:
        """To be called now and then."""
        lost = self.lost()
        for gpu in lost.keys() - self._told.keys():
            log.error("%s is lost: %s; the weights stay served, and followers pull", gpu_name(gpu), lost[gpu])
        for gpu in self._told.keys() - lost.keys():
            log.warning("%s answers again", gpu_name(gpu))
        self._told = lost

    def close(self) -> None:
        """Asks no more. Does not wait for a driver that does not answer."""
        self._ended.set()


class _Watch:
    """
    Attributes:
        refusal: of the last question that was answered; empty where the GPU was there.
        asked_ns: when the question that is not yet answered was asked; 0 for none.
    """

    def __init__(self, cuda: CudaRuntime, ordinal: int, every_s: float, ended: threading.Event) -> None:
        self.refusal, self.asked_ns = "", 0
        self._cuda, self._ordinal, self._every_s, self._ended = cuda, ordinal, every_s, ended
        threading.Thread(target=self._run, name=f"ftd-gpu-{ordinal}", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.asked_ns = monotonic_ns()
            try:
                self._cuda.use_device(self._ordinal)
                self._cuda.ask_device()
            except CudaError as error:
                self.refusal = error.message
            else:
                self.refusal = ""
            self.asked_ns = 0
