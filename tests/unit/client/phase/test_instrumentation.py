"""Files of what components were made with: readable, bounded, and never in the way."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ftd_client
from ftd_client import OffloadConfig
from ftd_client.phase import instrumentation
from ftd_client.phase.instrumentation import Files, Plain, recorder
from ftd_client.strategy import AllStreamed
from tests.conftest import NOBODY

NAME = "instrumented"


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


def config(**fields: Any) -> OffloadConfig:
    return OffloadConfig(
        include_patterns=["*"], pinned_memory=False, profiling_iters=1, load_strategy=AllStreamed(), **fields
    )


def run(directory: Path, *, on: bool = True, forwards: int = 3) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(False)
    expected = model(torch.ones(1, 16))
    ftd_client.offload(model, config(enable_instrumentation=on, instrumentation_output_dir=str(directory)), NAME)
    for _ in range(forwards):
        assert torch.equal(model(torch.ones(1, 16)), expected)


def written(directory: Path) -> list[tuple[str, Any]]:
    """(component, arguments) of all files, in the order of their names."""
    found = [json.loads(path.read_text()) for path in sorted(directory.iterdir())]
    assert all(file["pid"] == os.getpid() and file["torch"] == torch.__version__ for file in found)
    return [(file["component"], file["arguments"]) for file in found]


def test_the_engine_says_what_it_was_made_with(tmp_path: Path) -> None:
    run(tmp_path / "not" / "yet")
    files = written(tmp_path / "not" / "yet")
    setting_up = ["config", "device", "units", "host", "link"]
    assert [component for component, _ in files] == setting_up + ["problem", "plan"] * 2  # the second is measured
    by_name = dict(files)
    assert by_name["config"]["profiling_iters"] == 1
    assert by_name["config"]["load_strategy"] == "ftd.plan.strategy.AllStreamed"
    assert by_name["device"] == {"device": "cpu"}
    unit = by_name["units"][1]
    assert (unit["name"], unit["layer"], unit["scope"]) == ("1", "1", "torch.nn.modules.linear.Linear")
    assert unit["params"][0] == {"names": ["1.weight"], "nbytes": 1024, "tensor": "float32 (16, 16), strides (16, 1)"}
    assert by_name["host"]["kind"] == "none" and len(by_name["host"]["addresses"]) == 6
    assert by_name["link"]["link"] == "ftd_client.stream.cpu_link.CpuLink"
    assert by_name["link"]["cost"].keys() == {"latency_ns", "bytes_per_s"}
    assert by_name["problem"]["order"] == ["0", "1", "2"]
    assert sum(by_name["problem"]["measured"]["compute_ns"]) > 0
    manager = ftd_client.get_offload_manager(NAME)
    assert manager.plan is not None
    assert by_name["plan"]["ring_bytes"] == manager.plan.ring_bytes
    assert [place["address"] for place in by_name["plan"]["placements"]] == [p.address for p in manager.plan.placements]


def test_off_writes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "off", on=False)
    assert not (tmp_path / "off").exists()


def test_a_problem_without_a_plan_is_there_to_be_looked_at(tmp_path: Path) -> None:
    class Fails:
        name = "fails"

        def plan(self, problem: object) -> Any:
            raise RuntimeError("no plan")

    fields = {"load_strategy": Fails(), "max_gpu_mem_fraction": 0.5}
    asked = config(enable_instrumentation=True, instrumentation_output_dir=str(tmp_path)).model_copy(update=fields)
    with pytest.raises(Exception, match="no plan"):
        ftd_client.offload(nn.Sequential(nn.Linear(4, 4)), asked, NAME)
    assert [component for component, _ in written(tmp_path)][-1] == "problem"


class TestNeverInTheWay:
    def warned(self, caplog: pytest.LogCaptureFixture, *words: str) -> None:
        (text,) = [r.getMessage() for r in caplog.records if "instrumentation" in r.getMessage()]
        assert all(word in text for word in words), text

    def test_a_file_where_the_directory_should_be(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "taken").write_text("mine")
        run(tmp_path / "taken")
        self.warned(caplog, "config is not written", "taken", "FileExistsError")
        assert (tmp_path / "taken").read_text() == "mine"

    def test_a_directory_that_may_not_be_written(
        self, tmp_path: Path, in_child: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)

        def as_nobody() -> str:
            recorder(config(enable_instrumentation=True, instrumentation_output_dir=str(tmp_path)))(one=1, two=2)
            return "\n".join(record.getMessage() for record in caplog.records)

        text = in_child(as_nobody, uid=NOBODY)
        assert text.count("instrumentation stops") == 1 and "PermissionError" in text

    def test_a_full_disk(self, in_child: Any, caplog: pytest.LogCaptureFixture) -> None:
        """A tmpfs of 64 KiB: what fits is whole, what does not leaves nothing, and no more is tried."""

        def on_a_small_disk() -> tuple[list[str], str]:
            directory = Path("/dev/shm/instrumentation")
            record = Files(directory)
            record(small=1, large=["x" * 1000] * 100, later=2)
            names = [path.name for path in directory.iterdir()]
            json.loads((directory / names[0]).read_text())
            return names, "\n".join(r.getMessage() for r in caplog.records)

        names, text = in_child(on_a_small_disk, shm="size=64k")
        assert len(names) == 1 and names[0].endswith("-small.json")
        assert text.count("instrumentation stops: large is not written") == 1 and "No space left" in text

    def test_arguments_that_cannot_be_read(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def __repr__(self) -> str:
                raise ZeroDivisionError("its own")

        record = Files(tmp_path)
        record(fine=1, broken=Broken(), later=2)
        self.warned(caplog, "broken is not written", "ZeroDivisionError", "its own")
        assert [component for component, _ in written(tmp_path)] == ["fine"]

    def test_the_process_goes_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a").mkdir()
        monkeypatch.chdir(tmp_path / "a")
        record = Files(Path("out"))
        monkeypatch.chdir(tmp_path)
        record(one=1)
        assert written(tmp_path / "a" / "out") == [("one", 1)]


class TestBounds:
    def test_the_oldest_files_make_room_and_others_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instrumentation, "MAX_FILES", 5)
        (tmp_path / "20200101T000000.000000Z-notes.json").write_text("{}")
        record = Files(tmp_path)
        for number in range(12):
            record(one=number)
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
        assert found[0] == {}
        assert [file["arguments"] for file in found[1:]] == [7, 8, 9, 10, 11]

    def test_a_file_says_how_much_is_not_in_it(self) -> None:
        assert Plain(4).of(list(range(10))) == [0, 1, 2, "… 7 more"]
        assert Plain(4).of({key: key for key in "abcdefg"})["…"] == "5 more"
        text = Plain().of("x" * 10_000)
        assert len(text) == instrumentation.MAX_CHARACTERS + 1 and text.endswith("…")

    def test_what_holds_itself_ends(self) -> None:
        loop: list[object] = []
        loop.append(loop)
        assert "[" in json.dumps(Plain().of(loop))

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sets(st.integers()),
            lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
        ),
        st.integers(1, 50),
    )
    def test_anything_becomes_strict_json_of_a_bounded_size(self, value: object, most: int) -> None:
        text = json.dumps(Plain(most).of(value), allow_nan=False)
        assert text.count(",") <= 3 * most + 10


def test_values_keep_what_a_reader_needs() -> None:
    class Row(NamedTuple):
        nbytes: int

    @dataclass
    class Part:
        where: Path
        rows: tuple[Row, ...]

    class Thing:
        pass

    assert Plain().of(Part(Path("/a"), (Row(1),))) == {"where": "PosixPath('/a')", "rows": [{"nbytes": 1}]}
    assert Plain().of(Thing()).endswith("Thing")
    assert Plain().of({3, 1}) == [1, 3]
    assert Plain().of(float("nan")) == "nan"
    assert Plain().of(torch.float16) == "torch.float16"
    assert Plain().of(logging.INFO) == 20
