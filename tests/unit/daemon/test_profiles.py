import asyncio
import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftd.daemon.profiles import MAX_PROFILES, Profiles, directory_beside
from ftd.errors import FrameError, FtdError
from ftd.plan import store
from ftd.plan.profile import Identity, Profile, decode, encode
from ftd.plan.store import ProfileStorageError, file_name, listing
from ftd.plan.strictjson import ProfileError
from ftd.wire import frame
from ftd.wire import profiles as wire
from tests.conftest import mode_of
from tests.unit.plan.profiles import IDENTITY, PROFILE, on

ONE_MIB = 1 << 20


class Daemon:
    """The operations on a directory, each on a loop of its own, as control frames carry them."""

    def __init__(self, directory: Path) -> None:
        self.profiles = Profiles(directory)

    def put(self, data: bytes) -> None:
        assert self.ask(wire.PUT, wire.put_args(data)) == {}

    def get(self, identity: Identity = IDENTITY) -> Profile | None:
        data = wire.profile_got(self.ask(wire.GET, wire.get_args(identity.to_map())), 2 * ONE_MIB)
        return None if data is None else decode(data)

    def ask(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        async def carried() -> dict[str, Any]:
            handler = self.profiles.handlers()[op]
            return await handler(None, frame.decode(data := frame.encode(args)[4:], len(data)))

        return asyncio.run(carried())

    def start(self) -> None:
        """What the daemon does first, to its end."""
        self.profiles._look_around()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "llama.profiles"


@pytest.fixture
def daemon(directory: Path) -> Daemon:
    return Daemon(directory)


def test_the_directory_lies_beside_the_socket() -> None:
    assert directory_beside(Path("/run/ftd/llama.7b.sock")) == Path("/run/ftd/llama.7b.profiles")


def test_nothing_is_made_before_something_is_stored(daemon: Daemon, directory: Path) -> None:
    daemon.start()
    assert daemon.get() is None
    assert not directory.exists()
    assert daemon.profiles.warnings == []


def test_what_is_put_is_got_also_from_another_daemon(daemon: Daemon, directory: Path, umask: None) -> None:
    daemon.put(encode(PROFILE))
    assert daemon.get() == Daemon(directory).get() == PROFILE
    assert mode_of(directory) == 0o700


@pytest.mark.parametrize("changes", [{"torch": "2.6.0"}, {"device": "cpu"}, {"config": {}}, {"fingerprint": "ff"}])
def test_only_the_very_same_is_got(daemon: Daemon, changes: dict[str, Any]) -> None:
    daemon.put(encode(PROFILE))
    assert daemon.get(on(**changes).identity) is None


def test_the_later_one_counts(daemon: Daemon, directory: Path) -> None:
    daemon.put(encode(PROFILE))
    later = decode(encode(PROFILE).replace(b'"forwards": 10', b'"forwards": 11'))
    daemon.put(encode(later))
    assert daemon.get() == later
    assert len(listing(directory)) == 1


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({}, FrameError, "'profile' is NoneType"),
        (wire.put_args(b"garbage"), ProfileError, "is not JSON"),
        (wire.put_args(encode(PROFILE)[:-3]), ProfileError, "is not JSON"),
        (wire.put_args(encode(PROFILE).replace(b'"schema": 1', b'"schema": 2')), ProfileError, "schema is 2"),
        ({"profile": zlib.compress(bytes(64 * ONE_MIB))}, FrameError, "more than 2097152 bytes"),
    ],
)
def test_what_is_no_profile_is_never_kept(
    daemon: Daemon, directory: Path, args: dict[str, Any], error: type[FtdError], message: str
) -> None:
    with pytest.raises(error, match=message):
        daemon.ask(wire.PUT, args)
    assert not directory.exists()


@pytest.mark.parametrize(
    "identity", [{}, IDENTITY.to_map() | {"device": "../../x\0"}, IDENTITY.to_map() | {"config": {"x": b"bytes"}}]
)
def test_a_question_about_nothing_is_refused(daemon: Daemon, identity: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        daemon.ask(wire.GET, {"identity": identity})


def test_the_directory_is_bounded(daemon: Daemon, directory: Path) -> None:
    for number in range(MAX_PROFILES + 2):
        daemon.put(encode(on(torch=f"2.{number}")))
    assert len(listing(directory)) == MAX_PROFILES
    assert [daemon.get(on(torch=f"2.{number}").identity) is None for number in range(4)] == [True, True, False, False]


def test_a_profile_of_ten_thousand_units_goes_through_a_frame(daemon: Daemon) -> None:
    names = [f"model.layers.{i // 128}.mlp.experts.{i % 128}.down_proj" for i in range(10_000)]
    times = tuple(i * 7919 % 10**8 for i in range(10_000))
    large = replace(PROFILE, order=tuple(names), compute_ns=times)
    daemon.put(encode(large))
    assert daemon.get() == large


# --- what is damaged ---------------------------------------------------------------------------------------------


def test_a_damaged_file_is_a_warning_until_it_is_replaced(
    daemon: Daemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ftd")
    path = store.save(directory, PROFILE)
    store.save(directory, on(torch="2.6.0"))
    path.write_bytes(path.read_bytes()[:100])
    daemon.start()
    assert daemon.get() is None
    assert daemon.get() is None
    assert [text.split(":")[0] for text in daemon.profiles.warnings] == [f"{path} is no profile"]
    assert len(caplog.records) == 1
    assert daemon.get(on(torch="2.6.0").identity) is not None
    daemon.put(encode(on(torch="2.7.0")))
    assert len(daemon.profiles.warnings) == 1 and path.exists()
    daemon.put(encode(PROFILE))
    assert daemon.profiles.warnings == []
    assert daemon.get() == PROFILE


def test_one_that_was_damaged_while_the_daemon_ran_is_found_when_asked_for(daemon: Daemon, directory: Path) -> None:
    daemon.put(encode(PROFILE))
    path = directory / file_name(IDENTITY)
    path.write_bytes(encode(on(torch="2.6.0")))
    assert daemon.get() is None
    assert daemon.profiles.warnings == [f"{path} holds another profile than its name says"]


def test_a_directory_that_is_none_is_a_warning_and_an_error_to_who_stores(daemon: Daemon, directory: Path) -> None:
    directory.touch()
    daemon.start()
    assert daemon.get() is None
    assert any(f"{directory} cannot be read" in text for text in daemon.profiles.warnings)
    with pytest.raises(ProfileStorageError, match="no profile can be stored in"):
        daemon.put(encode(PROFILE))
    directory.unlink()
    daemon.put(encode(PROFILE))
    assert daemon.profiles.warnings == []


# --- beside the loop ---------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_holds_up_neither_the_loop_nor_its_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    begun: list[threading.Thread] = []
    ended: list[bool] = []

    def slow(*_: Any, **__: Any) -> Path:
        begun.append(threading.current_thread())
        began.set()
        ended.append(goes_on.wait(10))
        return directory / file_name(IDENTITY)

    monkeypatch.setattr(store, "save", slow)

    async def run() -> None:
        async with Profiles(directory) as profiles:
            put: Callable[..., Any] = profiles.handlers()[wire.PUT]
            storing = [asyncio.create_task(put(None, wire.put_args(encode(PROFILE)))) for _ in range(3)]
            while not began.is_set():
                await asyncio.sleep(0)  # the loop turns
            for task in storing:
                task.cancel()
            await asyncio.gather(*storing, return_exceptions=True)
        assert not ended  # left, while the first is still being stored

    asyncio.run(run())
    goes_on.set()
    begun[0].join(10)
    assert ended == [True]  # one after the other, and those that waited were dropped
