"""`ftd verify` with real daemons: what differs is found by name, and nothing else is."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftd_client
from ftd.errors import EXIT_FAILED, EXIT_NOT_READY, EXIT_NOT_RUNNING, EXIT_OK, EXIT_USAGE
from ftd.shm.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest, read_segment
from ftd.shm.names import Names
from ftd.shm.segment import path_of
from ftd.shm.state import State
from tests.conftest import NOBODY
from tests.process.checkpoints import TINY, held, hollow, tiny
from tests.process.daemons import QUICK, Daemon, frozen, ftd, refused, segments, wait_for
from tests.unit.shm.test_digest import reference
from tests.unit.source.checkpoint_files import A, B, Tensors, sharded, valid_file, write

Start = Callable[..., Daemon]

FIELDS = {
    "namespace", "ok", "generation", "fingerprint", "digest", "tensors", "bytes", "seconds", "differing", "problems",
    "source",
}  # fmt: skip


def verify(namespace: str, *arguments: str, status: int = EXIT_OK) -> dict[str, Any]:
    """What `ftd verify --json` prints."""
    result = ftd("verify", "-n", namespace, "--json", *arguments)
    assert (result.status, result.err) == (status, ""), result
    assert set(result.json) == FIELDS
    assert result.json["ok"] == (status == EXIT_OK)
    return result.json  # type: ignore[no-any-return]


def manifest(namespace: str) -> Manifest:
    data = read_segment(Names(namespace).manifest(1), MAX_MANIFEST_BYTES)
    assert data is not None
    return decode_manifest(data)


def flip(path: Path, at: int, mtime_ns: int | None = None) -> None:
    """Changes one bit in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def flip_live(namespace: str, name: str, at: int = 0) -> Path:
    """As a cosmic ray would, in the segment of a tensor."""
    extent = next(placed.extent for placed in manifest(namespace).tensors if placed.spec.name == name)
    path = path_of(Names(namespace).weights(1, extent.segment))
    flip(path, extent.offset + at)
    return path


def names_of(told: dict[str, Any]) -> list[str]:
    return [found["name"] for found in told["differing"]]


class TestSharedMemory:
    """Live segments against the manifest."""

    def test_all_is_as_published(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        told = verify(namespace)
        assert (told["tensors"], told["bytes"], told["generation"]) == (4, 896, 1)
        assert (told["differing"], told["problems"], told["source"]) == ([], [], None)
        assert told["digest"] == daemon.status()["model"]["digest"] and len(told["digest"]) == 32
        held_by = manifest(namespace)
        digests = {p.spec.name: digest for p, digest in zip(held_by.tensors, held_by.digests, strict=True)}
        assert digests == {name: reference(data) for name, (_, _, data) in TINY.items()}
        result = ftd("verify", "-n", namespace)
        assert (result.status, result.err) == (EXIT_OK, "")
        assert f"{namespace}: generation 1, 4 tensors, 896 B, digest {told['digest']}" in result.out
        assert "as published" in result.out and "differ" not in result.out
        assert told["digest"] in ftd("status", "-n", namespace).out

    @pytest.mark.parametrize("name", TINY)
    def test_a_bit_that_flipped_is_found_by_name(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path, name: str
    ) -> None:
        start("--model", model)
        path = flip_live(namespace, name, at=len(TINY[name][2]) - 1)
        told = verify(namespace, status=EXIT_FAILED)
        (found,) = told["differing"]
        assert (found["name"], found["place"], found["bytes"]) == (name, str(path), len(TINY[name][2]))
        assert f"expected {reference(TINY[name][2]).hex()}" in found["problem"]

    def test_every_tensor_that_differs_is_told(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        start("--model", model)
        for name in TINY:
            flip_live(namespace, name)
        assert sorted(names_of(verify(namespace, status=EXIT_FAILED))) == sorted(TINY)
        result = ftd("verify", "-n", namespace)
        assert result.status == EXIT_FAILED and all(name in result.out for name in TINY)
        assert "4 of 4 tensors differ" in result.out and "\n  → ftd start" in result.out

    def test_what_a_worker_changes_is_its_own(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """MD-12: a weight that is written to in place, by torch and past it, is a private copy."""
        start("--model", model)
        with ftd_client.attach(namespace, timeout=0) as weights:
            tensor = weights.state_dict()["embed.weight"]
            tensor.data.add_(1)
            tensor.numpy()[:] = 7
            verify(namespace)

    def test_padding_is_nobodys(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        start("--model", model)
        path = path_of(Names(namespace).weights(1, 0))
        flip(path, path.stat().st_size - 1)
        verify(namespace)

    def test_the_last_byte_of_a_long_tensor_counts(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        """33 MiB and a byte: two whole pieces and two parts of pieces."""
        data = os.urandom(1 << 20) * 33 + b"x"
        write(tmp_path, {"model.safetensors": valid_file({"w": ("U8", (len(data),), data)})})
        start("--model", tmp_path, "--set", "pin=none")
        assert manifest(namespace).digests == (reference(data),)
        verify(namespace)
        for at in (0, 16 << 20, len(data) - 1):
            flip_live(namespace, "w", at)
            assert names_of(verify(namespace, status=EXIT_FAILED)) == ["w"]
            flip_live(namespace, "w", at)
        verify(namespace)

    def test_tensors_without_bytes_are_as_published(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        """ST-01, ST-03: nothing, and one element without a dimension."""
        tensors: Tensors = {"none": ("F32", (0,), b""), "no": ("BF16", (3, 0), b""), "one": ("F32", (), b"abcd")}
        write(tmp_path, {"model.safetensors": valid_file(tensors)})
        start("--model", tmp_path)
        assert verify(namespace, "--source")["tensors"] == 3
        flip_live(namespace, "one")
        assert names_of(verify(namespace, status=EXIT_FAILED)) == ["one"]

    def test_a_segment_that_is_gone_or_cut_short(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path, tmp_path: Path
    ) -> None:
        """Never a SIGBUS."""
        start("--model", model)
        path = path_of(Names(namespace).weights(1, 0))
        size = path.stat().st_size
        os.truncate(path, 100)
        told = verify(namespace, status=EXIT_FAILED)
        assert (told["differing"], told["problems"]) == ([], [f"{path} has bytes 100: expected {size}"])
        path.unlink()
        assert verify(namespace, status=EXIT_FAILED)["problems"] == [f"{path} is gone"]
        path.write_bytes(bytes(size))
        (problem,) = verify(namespace, status=EXIT_FAILED)["problems"]
        assert f"{path} has inode " in problem
        assert f"{path} has inode " in ftd("verify", "-n", namespace).out

    def test_sidecar_files_count(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        start("--model", model)
        path = path_of(Names(namespace).files(1))
        flip(path, path.stat().st_size - 1)
        (problem,) = verify(namespace, status=EXIT_FAILED)["problems"]
        assert problem.startswith(f"{path}: ftdfiles: checksum")
        path.unlink()
        assert verify(namespace, status=EXIT_FAILED)["problems"] == [f"{path} is gone"]

    def test_a_damaged_manifest_is_an_error(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        start("--model", model)
        path = path_of(Names(namespace).manifest(1))
        flip(path, path.stat().st_size - 1)
        refused(ftd("verify", "-n", namespace), EXIT_FAILED, str(path), "not what was published")
        path.unlink()
        refused(ftd("verify", "-n", namespace), EXIT_FAILED, f"{path} is gone")

    def test_who_may_only_read_may_verify(
        self, start: Start, namespace: str, runtime_dir: Path, open_model: Path, in_child: Callable[..., Any]
    ) -> None:
        start("--model", open_model, "--set", "mode=0644")
        from ftd.daemon.verify import report
        from ftd.daemon.verify_table import bar

        told = in_child(lambda: report(namespace, source=True, show=bar), uid=NOBODY)
        assert told["ok"] and told["source"]["ok"]


class TestStates:
    """A daemon that does not serve, or not yet."""

    def test_nobody_runs(self, namespace: str, runtime_dir: Path) -> None:
        refused(ftd("verify", "-n", namespace), EXIT_NOT_RUNNING, f"{namespace} is not running")

    def test_a_dead_one_does_not_run(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        daemon.kill()
        refused(ftd("verify", "-n", namespace), EXIT_NOT_RUNNING, f"{namespace} is not running")
        assert ftd("stop", "-n", namespace, "--force").status == EXIT_OK

    def test_one_that_loads_is_not_ready(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        model = tiny(tmp_path)
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait_segments()
            refused(ftd("verify", "-n", namespace), EXIT_NOT_READY, f"{namespace} is loading: expected ready")
        daemon.wait_ready()

    def test_one_that_hangs_is_verified_all_the_same(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        daemon = start("--model", model, *QUICK)
        daemon.freeze()
        wait_for("it to hang", lambda: daemon.look().state is State.HUNG)
        verify(namespace)
        daemon.thaw()

    def test_a_name_that_is_none(self, runtime_dir: Path) -> None:
        refused(ftd("verify", "-n", "a/b"), EXIT_USAGE, "a/b")


class TestFiles:
    """`--source`: the checkpoint as it is now."""

    def test_as_published(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        sharded(tmp_path, {"x-00001.safetensors": A, "x-00002.safetensors": B})
        start("--model", tmp_path)
        told = verify(namespace, "--source")["source"]
        assert told == {"path": str(tmp_path), "ok": True, "differing": [], "problems": []}
        assert f"{tmp_path}: as published" in ftd("verify", "-n", namespace, "--source").out

    def test_a_bit_that_flipped_is_found_by_file_and_name(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        """ST-25: also where whoever wrote has put the time back; what was published is not affected."""
        sharded(tmp_path, {"x-00001.safetensors": A, "x-00002.safetensors": B})
        start("--model", tmp_path)
        path = tmp_path / "x-00002.safetensors"
        flip(path, path.stat().st_size - 1, mtime_ns=path.stat().st_mtime_ns)
        verify(namespace)
        told = verify(namespace, "--source", status=EXIT_FAILED)
        assert told["differing"] == []
        (found,) = told["source"]["differing"]
        assert (found["name"], found["place"]) == ("b.weight", "x-00002.safetensors")
        assert "'b.weight' in x-00002.safetensors at byte" in ftd("verify", "-n", namespace, "--source").out

    def test_both_ends_are_told_apart(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        write(tmp_path, {"model.safetensors": valid_file(A)})
        start("--model", tmp_path)
        path = tmp_path / "model.safetensors"
        flip(path, path.stat().st_size - 1)
        flip_live(namespace, "a.weight")
        told = verify(namespace, "--source", status=EXIT_FAILED)
        assert (names_of(told), names_of(told["source"])) == (["a.weight"], ["a.bias"])

    def test_another_model_in_its_place(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        write(tmp_path, {"model.safetensors": valid_file(A)})
        start("--model", tmp_path)
        other: Tensors = {"a.weight": ("F32", (3, 2), A["a.weight"][2]), "c": ("U8", (1,), b"c")}
        (tmp_path / "model.safetensors").write_bytes(valid_file(other))
        differing = verify(namespace, "--source", status=EXIT_FAILED)["source"]["differing"]
        assert {found["name"]: found["problem"] for found in differing} == {
            "a.weight": "is F32 [3, 2] now, published was F32 [2, 3]",
            "a.bias": "is in the checkpoint no more",
            "c": "is in the checkpoint and was not published",
        }

    def test_files_that_cannot_be_read_are_a_problem(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        write(tmp_path, {"model.safetensors": valid_file(A)})
        start("--model", tmp_path)
        path = tmp_path / "model.safetensors"
        os.truncate(path, path.stat().st_size - 1)
        told = verify(namespace, "--source", status=EXIT_FAILED)
        assert (told["differing"], told["source"]["differing"]) == ([], [])
        (problem,) = told["source"]["problems"]
        assert "model.safetensors" in problem and "1 bytes are missing" in problem
        path.unlink()
        assert str(tmp_path) in verify(namespace, "--source", status=EXIT_FAILED)["source"]["problems"][0]


class TestConfigured:
    """`verify` of the daemon's configuration."""

    def test_none_leaves_nothing_to_compare_with(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        daemon = start("--model", model, "--set", "verify=none")
        assert manifest(namespace).digests == () and daemon.status()["model"]["digest"] is None
        refused(ftd("verify", "-n", namespace), EXIT_USAGE, "published without digests", "verify: none")

    def test_full_publishes_what_is_as_stated(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        write(tmp_path, {"model.safetensors": valid_file(A)})
        data = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors.sha256").write_text(hashlib.sha256(data).hexdigest())
        daemon = start("--model", tmp_path, "--set", "verify=full")
        assert "stated" not in str(daemon.status()["warnings"])
        assert "1 of 1 files are what their publishers state" in daemon.log()
        verify(namespace, "--source")

    def test_full_refuses_what_is_not(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        """A blob of the hub's cache in which a bit has flipped."""
        data = valid_file(A)
        blob = hashlib.sha256(data).hexdigest()
        write(tmp_path, {f"models--o--n/blobs/{blob}": data})
        snapshot = tmp_path / "models--o--n/snapshots/c0ffee"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
        flip(tmp_path / "models--o--n/blobs" / blob, len(data) - 1)
        result = ftd("start", "-n", namespace, "--model", snapshot, "--set", "verify=full")
        refused(result, EXIT_FAILED, "model.safetensors has SHA-256", f"blobs/{blob} says {blob}")
        assert segments(namespace) == []
        shown = ftd("status", "-n", namespace, "--json")
        assert (shown.status, shown.json["failure"]["code"]) == (EXIT_FAILED, "source_damaged")
        assert ftd("start", "-n", namespace, "--model", snapshot, "--detach").status == EXIT_OK
        assert ftd("stop", "-n", namespace).status == EXIT_OK

    def test_full_names_files_of_which_nobody_states_a_hash(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        daemon = start("--model", model, "--set", "verify=full")
        assert "verify: full found no stated hash of 1 file: model.safetensors" in daemon.status()["warnings"]


def test_it_loads_neither_torch_nor_pydantic() -> None:
    code = "import ftd.daemon.verify, ftd.daemon.verify_table, sys; print({'torch', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_load_that_is_frozen_has_digested_what_it_read(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """Digests come with the reading, not after it: a load that was stopped half-way goes on and is right."""
    daemon = frozen(start, hollow(tmp_path, 256))
    daemon.thaw()
    daemon.wait_ready()
    assert set(manifest(namespace).digests) == {reference(bytes(1 << 20))}
    verify(namespace)
