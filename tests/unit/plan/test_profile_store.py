import errno
import json
import os
import resource
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from ftd.mutex import mutex
from ftd.plan import store
from ftd.plan.profile import Identity, ProfileMismatchError, encode
from ftd.plan.store import ProfileMissingError, ProfileStorageError, file_name, listing, load, read, save
from ftd.plan.strictjson import ProfileError
from tests.conftest import NOBODY, mode_of
from tests.unit.plan.profiles import IDENTITY, PROFILE, identities, on

InChild = Callable[..., Any]


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="ftd-profiles-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != store.LOCK_NAME)


# --- ordinary life -----------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    path = save(directory, PROFILE)
    assert path.read_bytes() == encode(PROFILE)
    assert names(directory) == [path.name] == ["NVIDIA-H200.6f1d2c3b4a596877.efa7f62dcf70.profile.json"]
    assert load(directory, IDENTITY) == read(directory, IDENTITY) == PROFILE


def test_one_of_the_same_identity_is_replaced_and_others_stay(tmp_path: Path) -> None:
    others = [on(torch="2.6.0"), on(device="NVIDIA L4"), on(config={}), on(fingerprint="ff")]
    for profile in [PROFILE, *others, PROFILE]:
        save(tmp_path, profile)
    assert len(names(tmp_path)) == 5
    assert [load(tmp_path, profile.identity) for profile in others] == others


@given(identities, identities)
def test_names_are_safe_and_tell_identities_apart(one: Identity, other: Identity) -> None:
    same = json.dumps(one.to_map()) == json.dumps(other.to_map())  # as texts: 1 and True are equal to Python
    assert (file_name(one) == file_name(other)) is same
    assert file_name(one) == file_name(Identity.from_map(json.loads(json.dumps(one.to_map()))))
    stem = file_name(one).removesuffix(store.SUFFIX)
    assert stem.replace(".", "").replace("-", "").replace("_", "").isalnum()
    assert stem.isascii() and not stem.startswith((".", "-")) and len(stem) < 80


def test_a_renamed_file_is_found_and_never_by_name_alone(tmp_path: Path) -> None:
    path = save(tmp_path, PROFILE)
    path.rename(tmp_path / "mine.profile.json")
    assert load(tmp_path, IDENTITY) == PROFILE
    assert read(tmp_path, IDENTITY) is None
    path.write_bytes(encode(on(torch="2.6.0")))
    with pytest.raises(ProfileError, match="holds another profile than its name says"):
        read(tmp_path, IDENTITY)


def test_a_directory_lists_what_it_holds(tmp_path: Path) -> None:
    path = save(tmp_path, PROFILE)
    (tmp_path / "a.profile.json").write_text('{"schema": 1}')
    (tmp_path / "notes.json").write_text("{}")
    damaged, good = sorted(listing(tmp_path), key=lambda entry: entry.identity is not None)
    assert (good.path, good.identity, good.profile, good.problem) == (path, IDENTITY, PROFILE, None)
    assert damaged.profile is None and "a profile without fingerprint" in str(damaged.problem)
    assert listing(tmp_path / "nowhere") == []


# --- nothing fits ------------------------------------------------------------------------------------------------


def test_no_directory_and_an_empty_one_are_a_missing_file(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no profile in .*: expected a file \*\.profile\.json") as caught:
            load(directory, IDENTITY)
        assert isinstance(caught.value, ProfileMissingError)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(directory))


def test_others_are_refused_with_every_difference_of_the_nearest(tmp_path: Path) -> None:
    near = save(tmp_path, on(torch="2.6.0", config={**IDENTITY.config, "max_gpu_mem_fraction": None}))
    far = save(tmp_path, on(torch="2.6.0", device="NVIDIA L4", config={}))
    (tmp_path / "z.profile.json").write_bytes(b"\xff")
    with pytest.raises(ProfileMismatchError, match=f"fits; the nearest is {near.name}") as caught:
        load(tmp_path, IDENTITY)
    assert list(caught.value.differences) == [
        'torch: measured with "2.6.0", expected "2.11.0+cu130"',
        "config.max_gpu_mem_fraction: measured with null, expected 0.5",
        f"{far.name} is further off: 5 differences",
        "z.profile.json is no profile: a profile is not UTF-8 at byte 0: expected JSON",
    ]


def test_a_profile_of_another_schema_is_refused_as_such(tmp_path: Path) -> None:
    path = save(tmp_path, PROFILE)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2, "novelty": []'))
    (entry,) = listing(tmp_path)
    assert (entry.profile, entry.problem) == (None, None)
    with pytest.raises(ProfileMismatchError) as caught:
        load(tmp_path, IDENTITY)
    assert list(caught.value.differences) == ["schema: measured with 2, expected 1"]


def test_damaged_files_alone_are_named_and_never_hide_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "a.profile.json").write_bytes(encode(PROFILE)[:-40])
    os.mkfifo(tmp_path / "b.profile.json")
    (tmp_path / "c.profile.json").mkdir()
    with pytest.raises(ProfileError) as caught:
        load(tmp_path, IDENTITY)
    assert type(caught.value) is ProfileError
    assert "a.profile.json is no profile: a profile is not JSON" in caught.value.message
    assert "b.profile.json is no profile: it is no regular file" in caught.value.message
    assert "c.profile.json is no profile: it is no regular file" in caught.value.message
    descriptors = os.listdir("/proc/self/fd")
    save(tmp_path, PROFILE, at_most=1)  # which evicts what it can, and no directory
    assert names(tmp_path) == sorted([file_name(IDENTITY), "c.profile.json"])
    assert load(tmp_path, IDENTITY) == PROFILE
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ProfileStorageError, match="cannot be read: not a directory"):
        load(tmp_path / "file", IDENTITY)
    with pytest.raises(ProfileStorageError, match=r"no profile can be stored in .*: file exists"):
        save(tmp_path / "file", PROFILE)


# --- writing that fails ------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path, in_child: InChild) -> None:
    path = save(tmp_path, PROFILE)

    def save_in_little_room() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        with pytest.raises(ProfileStorageError) as caught:
            save(tmp_path, PROFILE)
        return str(caught.value)

    assert f"no profile can be stored in {tmp_path}: file too large\n  → choose" in in_child(save_in_little_room)
    assert names(tmp_path) == [path.name]
    assert load(tmp_path, IDENTITY) == PROFILE


def test_a_full_disk_is_named(in_child: InChild) -> None:
    def save_on_a_full_disk() -> tuple[str, list[str]]:
        directory = Path("/dev/shm/profiles")
        directory.mkdir()
        filler = os.open("/dev/shm/filler", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            while True:
                os.write(filler, bytes(4096))
        with pytest.raises(ProfileStorageError) as caught:
            save(directory, PROFILE)
        return str(caught.value), names(directory)

    text, left = in_child(save_on_a_full_disk, shm="size=64k")
    assert "no space left on device\n  → make room there, or choose another directory" in text
    assert left == []


def test_a_directory_of_another_user_is_named(open_dir: Path, in_child: InChild) -> None:
    path = save(open_dir, PROFILE)

    def save_as_nobody() -> str:
        assert load(open_dir, IDENTITY) == PROFILE
        with pytest.raises(ProfileStorageError) as caught:
            save(open_dir, on(torch="2.6.0"))
        return str(caught.value)

    text = in_child(save_as_nobody, uid=NOBODY)
    assert f"no profile can be stored in {open_dir}" in text
    assert "→ choose a directory that this user may write" in text
    assert names(open_dir) == [path.name]
    open_dir.chmod(0o700)

    def load_as_nobody() -> str:
        with pytest.raises(ProfileStorageError) as caught:
            load(open_dir, IDENTITY)
        return str(caught.value)

    assert f"{open_dir} cannot be read: permission denied\n  → let this user read it" in in_child(
        load_as_nobody, uid=NOBODY
    )


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save(tmp_path, PROFILE)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert names(tmp_path) == [f".{file_name(IDENTITY)}.tmp"]
    assert listing(tmp_path) == []
    other = save(tmp_path, on(torch="2.6.0"))
    assert names(tmp_path) == [other.name]


def test_writers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "mutex", lambda path: mutex(path, timeout_s=0))
    with (
        mutex(tmp_path / store.LOCK_NAME),
        pytest.raises(ProfileStorageError, match=r"no profile can be stored in .*: .* is held by another process"),
    ):
        save(tmp_path, PROFILE)
    assert names(tmp_path) == []
    save(tmp_path, PROFILE)


# --- what a directory keeps --------------------------------------------------------------------------------------


def test_those_stored_longest_ago_go(tmp_path: Path) -> None:
    made = [on(torch=f"2.{i}") for i in range(5)]
    for profile in [*made, made[0]]:  # the first anew: it is young again
        save(tmp_path, profile, at_most=5)
    assert len(names(tmp_path)) == 5
    save(tmp_path, PROFILE, at_most=3)
    assert {entry.identity and entry.identity.torch for entry in listing(tmp_path)} == {"2.4", "2.0", "2.11.0+cu130"}


def test_the_order_survives_a_clock_that_is_set_back(tmp_path: Path) -> None:
    first = save(tmp_path, on(torch="2.1"), at_most=2)
    far_ns = first.stat().st_mtime_ns + 10**15
    os.utime(first, ns=(far_ns, far_ns))
    second = save(tmp_path, on(torch="2.2"), at_most=2)
    assert second.stat().st_mtime_ns > far_ns
    third = save(tmp_path, on(torch="2.3"), at_most=2)
    assert names(tmp_path) == sorted([second.name, third.name])


def test_modes(tmp_path: Path, umask: None) -> None:
    path = save(tmp_path / "closed", PROFILE, mode=0o700)
    assert mode_of(path.parent) == 0o700
    assert mode_of(path) & ~0o666 == 0 and mode_of(path) & stat.S_IRUSR
