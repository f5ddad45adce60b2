"""The demo from start to end: daemon, workers, the same with `from_pretrained`, and nothing left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd.clock import NS, monotonic_ns
from ftd.shm.names import SHM_DIR, listed
from ftd_client.demo import report
from ftd_client.demo.crew import Crew
from ftd_client.demo.daemon import Daemon
from ftd_client.demo.interrupts import Interrupts
from ftd_client.demo.measure import Memory, memory_of
from ftd_client.demo.prepare import child_environ, model_directory
from ftd_client.demo.problems import DemoError

_SENTENCES = (
    "One process keeps the model's weights in memory.",
    "All workers share a single copy of the parameters.",
    "A cat is asleep on the warm windowsill.",
    "The kitten is taking a nap in the sun.",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; None and empty stand for the demo's own model and sentences."""

    model: Path | None
    workers: int
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """Answers and memory of one crew."""

    answers: list[dict[str, Any]]
    memory: Memory


def run(options: Options, interrupts: Interrupts) -> None:
    """Everything; whatever ends it, workers and daemon are gone afterwards and the scratch directory is removed.

    Raises:
        FtdError: a step failed, a signal came, or the proof failed.
    """
    began_ns = monotonic_ns()
    model = model_directory(options.model)
    sentences = list(options.sentences or _SENTENCES)
    namespace = f"demo-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ftd-demo-") as folder:
        scratch = Path(folder)
        environ = child_environ(scratch, namespace, options.workers)
        with Daemon(namespace, model, environ, interrupts) as daemon:
            order = {"kind": "ftd", "source": namespace, "sentences": sentences}
            with Crew.of(options.workers, order, environ, scratch) as crew:
                crew.gather(interrupts)
                answers = crew.in_turn(interrupts)
                segments = str(SHM_DIR / f"ftd.{namespace}.")
                ftd = Shown(answers, memory_of([daemon.pid, *crew.pids], lambda path: path.startswith(segments)))
                report.similarity(answers[0])
                daemon.show_status()
            daemon.stop()
        order = {"kind": "from_pretrained", "source": str(model), "sentences": sentences}
        report.note(f"now as many workers with from_pretrained ({options.workers}) …")
        with Crew.of(options.workers, order, environ, scratch) as crew:
            crew.gather(interrupts)
            is_checkpoint = _one_of(model.glob("*.safetensors"))
            loaded = Shown(crew.in_turn(interrupts), memory_of(crew.pids, is_checkpoint))
            copied = Shown(crew.in_turn(interrupts), memory_of(crew.pids, is_checkpoint))
    report.times(ftd.answers, loaded.answers)
    report.memory(ftd.memory, loaded.memory, copied.memory, options.workers)
    _check_equal(ftd.answers, copied.answers)
    _check_clean(namespace, scratch)
    report.closing(namespace, scratch, (monotonic_ns() - began_ns) / NS)


def _one_of(files: Iterable[Path]) -> Callable[[str], bool]:
    # the hub's cache holds links: the kernel names what they point to
    paths = {str(path.resolve()) for path in files}
    return lambda path: path in paths


def _check_equal(ftd: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> None:
    digests = {answer["digest"] for answer in (*ftd, *reference)}
    equal = len(digests) == 1
    report.equality(ftd[0]["model"], len(ftd), equal=equal)
    if not equal:
        raise DemoError(
            f"outputs differ: {len(digests)} different ones found from {len(ftd)} workers of each kind, one expected",
            "see whether config.json asks for another dtype than the weights have; otherwise report this",
        )


def _check_clean(namespace: str, scratch: Path) -> None:
    left = [*(f"/dev/shm{name.name}" for name in listed(namespace)), *([str(scratch)] if scratch.exists() else [])]
    if left:
        raise DemoError(f"left behind: {', '.join(left)}", f"ftd stop -n {namespace} --force, and rm -r for the rest")
