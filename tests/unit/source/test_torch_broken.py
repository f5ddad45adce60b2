"""Torch checkpoints that are damaged, forged or no such thing: refused by name, without memory for what they claim."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import refusal, write
from torch_files import (
    LAYOUTS,
    archive,
    mapping,
    named,
    older,
    same,
    saved,
    served,
    storage,
    stream,
    tensor,
    text,
    tuple_of,
    whole,
    written,
    zip_of,
)  # fmt: skip

from ftd.errors import SourceError
from ftd.source import statedict
from ftd.source.resolve import resolve
from ftd.units import MIB

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
#: Two elements.
TWO = np.arange(2, dtype="<f4").tobytes()
W = tensor(storage("0", 2), (2,), (1,))


def message(path: Path, raw: bytes) -> str:
    return refusal(written(path, raw)).message


@pytest.fixture
def flat_memory() -> Iterator[None]:
    """What the block allocates stays within 40 MiB, whatever a file of a few kilobytes claims."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


# --- cut short, or something else ---------------------------------------------------------------------------------


def test_an_empty_file(tmp_path: Path) -> None:
    """TL-03."""
    assert message(tmp_path, b"").endswith("model.pt: is empty (0 bytes)")


@pytest.mark.parametrize("as_zip", LAYOUTS, ids=["zip", "older"])
def test_every_shorter_file_is_refused(tmp_path: Path, as_zip: bool) -> None:
    """TL-03: cut anywhere."""
    raw = saved(STATE, as_zip=as_zip)
    for length in range(len(raw)):
        refusal(written(tmp_path, raw[:length]))
    assert same(served(written(tmp_path, raw)), STATE)


def test_a_cut_zip_and_a_cut_file_of_the_older_layout_say_so(tmp_path: Path) -> None:
    """TL-03."""
    assert "is a zip archive without its end: it is cut short" in message(tmp_path, saved(STATE)[:-10])
    raw = saved(STATE, as_zip=False)
    cut = message(tmp_path, raw[:-1])
    assert f"file is {len(raw) - 1} bytes, its storages need at least {len(raw)}: 1 bytes are missing" in cut
    assert "has a pickle that is cut short" in message(tmp_path, raw[:300])


def test_the_tar_layout(tmp_path: Path) -> None:
    """TL-03: torch before 0.1.10, and tars that are something else."""
    for member, words in (("sys_info", "as torch before 0.1.10 wrote it"), ("weights", "it is a tar archive")):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(tarfile.TarInfo(member))
        assert words in message(tmp_path, file.getvalue())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "it is a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "it is an HTML page"),
        (bytes(4096), "it is zeros"),
        (b"GGUF\3\0\0\0", "it is a GGUF file"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"a": 3}        ', "it is a safetensors file"),
        (b"something", "neither a zip archive nor a pickle"),
        (stream(mapping({"a": whole(3)})), "is a pickle, but none that torch.save wrote"),
        (b"\x80\x02", "has a pickle that is cut short"),
        (zip_of({"a/b": b""}), "none that torch.save wrote: it has no <name>/data.pkl"),
        (zip_of({"a/data.pkl": b"", "b/data.pkl": b""}), "none that torch.save wrote"),
    ],
)
def test_what_is_something_else_is_named(tmp_path: Path, raw: bytes, words: str) -> None:
    """ST-26 of torch checkpoints."""
    found = message(tmp_path, raw)
    assert words in found and str(tmp_path / "model.pt") in found


def test_a_torchscript_archive(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    error = refusal(written(tmp_path, file.getvalue()))
    assert "is a TorchScript archive" in error.message and "torch.jit.load" in error.remedy


@pytest.mark.parametrize("make", [archive, older])
def test_big_endian(tmp_path: Path, make: Callable[..., bytes]) -> None:
    more = {"byteorder": b"big"} if make is archive else {"little": False}
    assert "was written on a big-endian machine" in message(tmp_path, make(mapping({"w": W}), {"0": TWO}, **more))


# --- the archive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"zip64": True}, {"comment": b"said here"}])
def test_archives_as_other_writers_make_them(tmp_path: Path, form: dict[str, object]) -> None:
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/data/0": TWO}
    path = written(tmp_path, zip_of(members, **form))  # type: ignore[arg-type]
    assert same(served(path), {"w": torch.arange(2.0)})


def test_an_archive_as_python_writes_it(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("модель/data.pkl", stream(mapping({"w": W})))
        with made.open("модель/data/0", "w", force_zip64=True) as member:
            member.write(TWO)
    assert same(served(written(tmp_path, file.getvalue())), {"w": torch.arange(2.0)})


def test_compressed_and_encrypted_members_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x/data.pkl", stream(mapping({"w": W})))
    assert "has the member 'x/data.pkl' compressed" in message(tmp_path, file.getvalue())
    raw = bytearray(archive(mapping({"w": W}), {"0": TWO}))
    entry = raw.rfind(b"PK\x01\x02")
    raw[entry + 8] |= 1
    assert "has the member 'x/data/0' encrypted" in message(tmp_path, bytes(raw))


def test_a_member_twice(tmp_path: Path) -> None:
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/data/0": TWO, "x/data/0\0again": bytes(8)}
    assert "has the member 'x/data/0' more than once" in message(tmp_path, zip_of(members))
    # torch looks for members without regard to case, and takes the other one
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/DATA/0": TWO, "x/data/0": bytes(8)}
    assert "has the member 'x/data/0' more than once" in message(tmp_path, zip_of(members))


def test_storages_that_lie_in_one_another(tmp_path: Path) -> None:
    """An archive of a few bytes could otherwise stand for any number of gigabytes."""
    value = mapping({"a": W, "b": tensor(storage("1", 2), (2,), (1,))})
    raw = bytearray(archive(value, {"0": TWO, "1": TWO}))
    first = raw.find(b"PK\x03\x04", raw.find(b"x/data/0") - 40)
    entry = raw.rfind(b"PK\x01\x02")
    assert raw[entry + 46 : entry + 54] == b"x/data/1"
    raw[entry + 42 : entry + 46] = first.to_bytes(4, "little")
    assert "another member than 'x/data/1' is at byte" in message(tmp_path, bytes(raw))
    raw = raw.replace(b"x/data/0", b"x/data/1", 1)  # the name in front of the bytes
    found = message(tmp_path, bytes(raw))
    assert "another member than 'x/data/0'" in found or "inside another one" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 9}, "it lists 3 members, expected 9"),
        ({"begin": 0}, "its directory ends at byte"),
        ({"nbytes": 10}, "its directory ends at byte"),
        ({"nbytes": 2**31}, "reaches behind byte"),
        ({"begin": 2**32 - 2}, "reaches behind byte"),
    ],
)
def test_an_end_that_says_something_else(
    tmp_path: Path, flat_memory: None, changes: dict[str, int], words: str
) -> None:
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/data/0": TWO, "x/version": b"3"}
    assert words in message(tmp_path, zip_of(members, **changes))


def test_a_directory_that_begins_elsewhere(tmp_path: Path) -> None:
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/data/0": TWO}
    raw = zip_of(members)
    nbytes, begin = struct.unpack_from("<II", raw, len(raw) - 10)
    moved = zip_of(members, begin=begin - 4, nbytes=nbytes + 4)
    assert "no member is listed at byte 0 of its directory" in message(tmp_path, moved)


def test_a_zip64_end_with_sizes_of_nowhere(tmp_path: Path, flat_memory: None) -> None:
    members = {"x/data.pkl": stream(mapping({"w": W})), "x/data/0": TWO}
    for changes in ({"nbytes": 2**64 - 1}, {"begin": 2**63}, {"count": 2**64 - 1}):
        assert "is a damaged zip archive" in message(tmp_path, zip_of(members, zip64=True, **changes))


def test_a_member_of_more_bytes_than_there_are(tmp_path: Path, flat_memory: None) -> None:
    raw = bytearray(archive(mapping({"w": W}), {"0": TWO}))
    for entry, name in ((raw.rfind(b"PK\x01\x02"), "x/data/0"), (raw.find(b"PK\x01\x02"), "x/data.pkl")):
        changed = bytearray(raw)
        changed[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)
        found = message(tmp_path, bytes(changed))
        assert name in found or "storage '0'" in found


def test_a_large_archive_whose_directory_claims_all_of_it(tmp_path: Path, flat_memory: None) -> None:
    path = tmp_path / "model.pt"
    size = 1 << 32
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(size)
        file.seek(size)
        file.write(zip_of({}, zip64=True, begin=0, nbytes=size, count=1))
        # the locator must point at the record, which is no longer at the front
        file.seek(size + 56 + 8)
        file.write(struct.pack("<Q", size))
    assert "has a zip directory of 4294967296 bytes, expected at most 100000000" in refusal(path).message


def test_bytes_behind_the_end(tmp_path: Path) -> None:
    assert "is a damaged zip archive" in message(tmp_path, saved(STATE) + b"x")


def test_an_archive_behind_another_one(tmp_path: Path) -> None:
    """The end of the second fits the first, where both have one length."""
    one, other = (archive(mapping({"w": W}), {"0": content}) for content in (TWO, bytes(8)))
    assert "is a damaged zip archive: its directory ends at byte" in message(tmp_path, one + other)


def test_a_large_sparse_archive_is_read_where_it_lies(tmp_path: Path, flat_memory: None) -> None:
    """Offsets above 4 GiB, in zip64, of an archive that torch wrote."""
    path = tmp_path / "model.pt"
    numel = (1 << 32) + 5
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(numel, dtype=torch.uint8), "w": torch.empty(3)}, path)
    by_name = {stored.spec.name: stored for stored in resolve(path).tensors}
    assert by_name["big"].spec.nbytes == numel and by_name["w"].offset > numel
    assert by_name["w"].offset + 12 <= path.stat().st_size


# --- the pickle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "cannot be read at byte"),
        (b"t", "cannot be read at byte"),
        (b"e", "cannot be read at byte"),
        (b"Nb", "cannot be read at byte"),
        (b"h\x07", "cannot be read at byte"),
        (b"NQ", "cannot be read"),
        (b"NNs", "cannot be read"),
        (b"NN\x93", "cannot be read"),
        (b"N)R", "cannot be read"),
        (b"}(Nu", "cannot be read"),
        (b"P1\n", "has the pickle opcode 0x50 at byte"),
        (b"i__main__\nX\n", "has the pickle opcode 0x69"),
        (b"\x82\x01", "has the pickle opcode 0x82"),
        (b"\x80\x09N", "is a pickle of protocol 9, expected 2 to 5"),
        (b"X\xff\xff\xff\xff", "has a pickle that is cut short"),
        (b"\x8d" + b"\xff" * 8, "has a pickle that is cut short"),
        (b"\x8b\xff\xff\xff\x7f", "has a pickle that is cut short"),
        (b"X\x01\0\0\0\xff", "cannot be read at byte"),
        (b"c" + b"a" * 2000 + b"\n", "cannot be read at byte"),
        (named("torch", "FloatStorage") + b")R", "cannot be read at byte"),
        (named("torch._utils", "_rebuild_tensor_v2") + b")R", "cannot be read at byte"),
        (tensor(b"N", (2,), (1,)), "cannot be read at byte"),
        (tensor(storage("0", -2), (2,), (1,)), "cannot be read at byte"),
        (tensor(storage("0", 2), (2,), ()), "cannot be read at byte"),
        (tensor(storage("0", 2), (-2,), (1,)), "cannot be read at byte"),
        (tensor(storage("0", 2, "NoStorage"), (2,), (1,)), "types that no state dict needs: torch.NoStorage"),
        (
            tensor(storage("0", 2, "FloatStorage", tuple_of(text("v"), whole(0), whole(2))), (2,), (1,)),
            "are views of others",
        ),
    ],
)
def test_pickles_that_no_state_dict_has(tmp_path: Path, value: bytes, words: str) -> None:
    for raw in (archive(value, {"0": TWO}), older(value, {"0": TWO})):
        assert words in message(tmp_path, raw)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor(storage("0", 2), (3,), (1,)), "tensor 'w' ends at byte 12 of a storage of 8 bytes"),
        (tensor(storage("0", 2), (2,), (1,), 1), "tensor 'w' ends at byte 12 of a storage of 8 bytes"),
        (tensor(storage("0", 2), (2,), (2,)), "tensor 'w' ends at byte 12"),
        (tensor(storage("0", 2), (2**31 - 1,) * 4, (0,) * 4), "tensor 'w' has more than 2^63-1 elements"),
        (tensor(storage("0", 2), (2**31 - 1, 2**31 - 1), (0, 0)), "describes tensors of"),
        (tensor(storage("0", 2), (1,) * 65, (1,) * 65), "tensor 'w' has 65 dimensions, at most 64 are usable"),
        (tensor(storage("0", 2), (2,), (1,), 0, mapping({"neg": b"\x88"})), "its bytes are not its values"),
    ],
)
def test_tensors_that_contradict_their_storage(tmp_path: Path, value: bytes, words: str) -> None:
    """ST-19 of torch checkpoints: by the tensor's name, before anything is read."""
    for raw in (archive(mapping({"w": value}), {"0": TWO}), older(mapping({"w": value}), {"0": TWO})):
        assert words in message(tmp_path, raw)


def test_storages_that_are_not_as_described(tmp_path: Path) -> None:
    other = mapping({"w": tensor(storage("1", 2), (2,), (1,))})
    assert "lacks the storage '1'" in message(tmp_path, archive(other, {"0": TWO}))
    assert "has a list of storages that does not fit its tensors" in message(tmp_path, older(other, {"0": TWO}))
    other = mapping({"w": tensor(storage("0", 3), (2,), (1,))})
    assert "has 8 bytes of storage '0', its tensors need 12" in message(tmp_path, archive(other, {"0": TWO}))
    raw = older(mapping({"w": W}), {"0": TWO}).replace((2).to_bytes(8, "little") + TWO, (9).to_bytes(8, "little") + TWO)
    assert "has 9 elements of storage '0' at byte" in message(tmp_path, raw)
    raw = older(mapping({"w": W}), {"0": TWO})
    keys = raw.rfind(b"\x80\x02]")
    raw = raw[:keys] + b"\x80\x02](" + text("0") * 2 + b"e." + ((2).to_bytes(8, "little") + TWO) * 2
    assert "of storage '0' at byte" in message(tmp_path, raw)


def test_two_descriptions_of_one_storage_must_agree(tmp_path: Path) -> None:
    value = mapping({"a": W, "b": tensor(storage("0", 1, "DoubleStorage"), (1,), (1,))})
    assert "storage" not in str(resolve(written(tmp_path, archive(value, {"0": TWO}))).notes)  # the same bytes
    value = mapping({"a": W, "b": tensor(storage("0", 4), (4,), (1,))})
    assert "has 8 bytes of storage '0', its tensors need 16" in message(tmp_path, archive(value, {"0": TWO}))
    assert "has 8 bytes of storage '0', its tensors need 16" in message(tmp_path, older(value, {"0": TWO}))


def memoised(value: bytes, index: int) -> bytes:
    return value + b"r" + index.to_bytes(4, "little")


def remembered(index: int) -> bytes:
    return b"j" + index.to_bytes(4, "little")


def often(function: bytes, *arguments: bytes) -> bytes:
    """A list of 2000 results of one call."""
    return b"](" + (function + tuple_of(*arguments) + b"R") * 2000 + b"e"


def laughs() -> bytes:
    """Twelve dicts, each with the one before as ten values."""
    dicts = [memoised(mapping({f"{k}" * 40: W for k in range(10)}), 0)]
    dicts += [memoised(mapping({f"{k}" * 40: remembered(n) for k in range(10)}), n + 1) for n in range(11)]
    return b"0".join(dicts)


LONG_LIST = memoised(b"](" + b"]" * 50_000 + b"e", 1) + b"0"
LONG_TUPLE = memoised(b"(" + b"K\x01" * 50_000 + b"t", 1) + b"0"


@pytest.mark.parametrize(
    "value",
    [
        b"Nr\xff\xff\xff\xff",
        LONG_LIST + often(named("builtins", "set"), remembered(1)),
        LONG_LIST + often(named("collections", "OrderedDict"), remembered(1)),
        LONG_TUPLE + often(
            named("torch._utils", "_rebuild_tensor_v2"), storage("0", 2), b"K\0", remembered(1), remembered(1), b"\x89N"
        ),
        memoised(b"}", 1) + text("a") + remembered(1) + b"s",
        laughs(),
    ],
    ids=["memo", "sets", "ordered", "shapes", "itself", "laughs"],
)  # fmt: skip
def test_a_few_bytes_that_stand_for_many(tmp_path: Path, flat_memory: None, value: bytes) -> None:
    raw = archive(value, {"0": TWO})
    tracemalloc.reset_peak()
    refusal(written(tmp_path, raw))


@pytest.mark.parametrize(
    "value", [b"N" + b"\x85" * 9000, b"]" * 9000, b"}(" + b"NN" * 9000 + b"u", b"(" * 9000 + b"t" * 9000]
)
def test_containers_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes) -> None:
    """One byte of the stream makes a hundred here."""
    monkeypatch.setattr("ftd.source.pickled.MAX_VALUES", 8000)
    assert "holds more than 8000 values in containers" in message(tmp_path, archive(value, {"0": TWO}))


def test_long_keys_above_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of 20 MB above 14 tensors was 2.3 GB of names."""
    value = {"k" * 400: {str(number): torch.ones(1) for number in range(3)}}
    assert len(served(written(tmp_path, value))) == 3
    monkeypatch.setattr(statedict, "_MAX_NAME_CHARACTERS", 1000)
    assert "has keys that make far longer names than themselves" in message(tmp_path, saved(value))


def test_a_whole_model_of_many_types_is_told_to_save_its_state(tmp_path: Path) -> None:
    value = tuple_of(*(named("my.models", f"Layer{i}") for i in range(20)))
    error = refusal(written(tmp_path, archive(value, {})))
    assert "my.models.Layer0, " in error.message and "and 12 more" in error.message
    assert "torch.save(model.state_dict(), path)" in error.remedy and "allow_types" not in error.remedy


def test_a_deep_nest_ends_in_words(tmp_path: Path) -> None:
    value = b"".join(b"}" + text("a") for _ in range(5000)) + b"N" + b"s" * 5000
    assert "is nested more than 64 levels deep" in message(tmp_path, archive(value, {"0": TWO}))


def test_a_shard_of_torch_that_is_missing(tmp_path: Path) -> None:
    """ST-12 of torch checkpoints."""
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    write(tmp_path, {"one.bin": saved({"a": torch.ones(2)}), "pytorch_model.bin.index.json": index})
    error = refusal(tmp_path)
    assert "1 of 2 files that pytorch_model.bin.index.json names missing: two.bin" in error.message
    write(tmp_path, {"two.bin": saved({"c": torch.ones(2)})})
    assert "two.bin lacks 1 tensor that the index takes from it: 'b'" in refusal(tmp_path).message


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for raw in (saved(STATE), saved(STATE)[:-5], saved(STATE, as_zip=False)[:-5], b"x"):
        try:
            resolve(written(tmp_path, raw))
        except SourceError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before
