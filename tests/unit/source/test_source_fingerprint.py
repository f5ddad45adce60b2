"""What the identity of a checkpoint depends on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_files import INDEX, A, B, filled, index_of, sharded, write

from ftd.source.resolve import resolve


def test_the_fingerprint_does_not_depend_on_the_order_of_the_index(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B})
    before = resolve(tmp_path).fingerprint()
    assert len(before) == 32 and int(before, 16)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    write(tmp_path, {INDEX: index})
    assert resolve(tmp_path).fingerprint() == before


@pytest.mark.parametrize("change", ["touch", "replace", "header", "index", "sidecar", "path", "rename"])
def test_the_fingerprint_depends_on_what_would_be_served(tmp_path: Path, change: str) -> None:
    model = sharded(tmp_path / "m", {"one.safetensors": A, "two.safetensors": {**B, "extra": filled("U8", (4,))}})
    write(model, {"config.json": "{}"})
    before = resolve(model).fingerprint()
    path = model / "two.safetensors"
    if change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "replace":
        status = path.stat()
        (model / "copy").write_bytes(path.read_bytes())
        os.utime(model / "copy", ns=(status.st_mtime_ns, status.st_mtime_ns))
        (model / "copy").rename(path)
    elif change == "header":
        # same file, size and time: only the header's bytes say it
        status = path.stat()
        path.write_bytes(path.read_bytes().replace(b'"U8"', b'"I8"'))
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    elif change == "index":
        write(model, {INDEX: index_of({"one.safetensors": list(A), "two.safetensors": list(B)})})
    elif change == "sidecar":
        write(model, {"config.json": '{"x": 1}'})
    elif change == "path":
        model = model.rename(tmp_path / "n")
    else:
        path.rename(model / "three.safetensors")
        text = (model / INDEX).read_text().replace("two.safetensors", "three.safetensors")
        write(model, {INDEX: text})
    assert resolve(model).fingerprint() != before
