"""`ftd doctor` as scripts and people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftd.errors import EXIT_FAILED, EXIT_OK
from tests.process.daemons import ftd

#: Processor time of a look, imports included; a busy machine does not count in it, and CUDA where there is any does.
LOOK_S = 0.3


def test_the_object_is_complete_and_says_what_it_did_not_like(runtime_dir: Path) -> None:
    done = ftd("doctor", "--json")
    shown = done.json
    assert set(shown) == {"ok", "checks", "versions"}
    assert done.status == (EXIT_OK if shown["ok"] else EXIT_FAILED)
    for check in shown["checks"]:
        assert set(check) == {"name", "verdict", "found", "expected", "remedy"}
        assert bool(check["remedy"]) == (check["verdict"] != "ok")


def test_people_see_the_same(runtime_dir: Path) -> None:
    done, shown = ftd("doctor"), ftd("doctor", "--json").json
    for check in shown["checks"]:
        assert check["name"] in done.out
        assert check["remedy"] in done.out


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_what_fails_is_status_1_with_a_remedy(option: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = ftd("doctor", *option, environ={"FTD_RUNTIME_DIR": str(tmp_path / "open")})
    assert done.status == EXIT_FAILED
    assert "writable by others than its owner" in done.out
    assert "set FTD_RUNTIME_DIR" in done.out


def test_it_changes_nothing(tmp_path: Path) -> None:
    assert ftd("doctor", environ={"FTD_RUNTIME_DIR": str(tmp_path / "new")}).status == EXIT_OK
    assert not (tmp_path / "new").exists()


def test_a_look_is_quick_and_loads_neither_torch_nor_the_daemon(runtime_dir: Path) -> None:
    code = """
import json, os, sys, time
begun = time.process_time()
from ftd.doctor.probe import look
from ftd.doctor.report import report
report(look(os.environ))
heavy = [name for name in ("torch", "pydantic", "asyncio", "rich") if name in sys.modules]
print(json.dumps([time.process_time() - begun, heavy]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    cpu_s, heavy = json.loads(done.stdout)
    assert heavy == []
    assert cpu_s < LOOK_S
