"""When a load reads the sidecar files, seen from the loader itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftd.config.model import DaemonConfig
from ftd.daemon import creator
from ftd.daemon.fill import Filler
from ftd.daemon.progress import LoadProgress
from ftd.errors import SourceChangedError
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import Access
from ftd.source.base import Checkpoint
from ftd.source.resolve import resolve
from tests.unit.source.checkpoint_files import A, valid_file, write


def load(names: Names, model: Path) -> creator.Generation:
    config = DaemonConfig(model=model, pin="none")
    progress = LoadProgress()
    return creator.materialize(names, 1, config, Access(), progress, holders=lambda: "", note=lambda text: None)


def test_one_that_changed_ends_the_load_before_a_weight_is_read(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may take minutes: nobody should wait for them to hear of a file of some bytes."""
    write(tmp_path, {"model.safetensors": valid_file(A), "config.json": "{}"})

    def resolved(path: Path, *_: object) -> Checkpoint:
        checkpoint = resolve(path)
        (tmp_path / "config.json").write_text('{"grown": true}')
        return checkpoint

    def read(self: Filler, plan: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(creator, "resolve", resolved)
    monkeypatch.setattr(Filler, "run", read)
    with pytest.raises(SourceChangedError, match=r"config.json has 15 bytes: expected 2") as caught:
        load(names, tmp_path)
    assert caught.value.remedy.startswith("start again")
    assert list(SHM_DIR.glob(f"ftd.{names.namespace}*")) == []


@pytest.mark.leaves_segments
def test_one_that_changes_while_weights_are_read_is_published_as_it_was(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"model.safetensors": valid_file(A), "config.json": "{}"})
    run = Filler.run

    def read(self: Filler, plan: list[object]) -> None:
        (tmp_path / "config.json").write_text('{"grown": true}')
        run(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Filler, "run", read)
    load(names, tmp_path).close()
    published = (SHM_DIR / f"ftd.{names.namespace}.g1.files").read_bytes()
    assert b"config.json" in published and b"grown" not in published
