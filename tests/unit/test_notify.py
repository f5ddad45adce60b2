"""Telling the service manager, and hearing what a daemon tells."""

import json
import logging
import os
import socket
import stat
import uuid
from pathlib import Path

import pytest

from ftd import errors
from ftd.daemon import notify
from ftd.daemon.notify import Notifier, NotifyListener, reported_error, without_manager


def telling(listener: NotifyListener) -> Notifier:
    return Notifier.from_environ({"NOTIFY_SOCKET": listener.address})


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest) -> NotifyListener:
    address = f"@ftd-test-{uuid.uuid4().hex}" if request.param == "abstract" else None
    with NotifyListener(address) as made:
        yield made


def test_what_is_told_is_what_sd_notify_says(listener: NotifyListener) -> None:
    notifier = telling(listener)
    told = [
        (notifier.status("loading: 12 %"), {"STATUS": "loading: 12 %"}),
        (notifier.extend_timeout(2.5), {"EXTEND_TIMEOUT_USEC": "2500000"}),
        (notifier.ready("serving 8.00 GiB"), {"READY": "1", "STATUS": "serving 8.00 GiB"}),
        (notifier.watchdog(), {"WATCHDOG": "1"}),
        (notifier.stopping("unpinning"), {"STOPPING": "1", "STATUS": "unpinning"}),
    ]
    for taken, fields in told:
        assert taken
        assert listener.receive(5) == fields
    assert listener.receive(0) is None
    assert listener.receive(0.01) is None


def test_a_line_break_in_a_text_begins_no_other_field(listener: NotifyListener) -> None:
    telling(listener).status("loading\nREADY=1\r\n  done")
    assert listener.receive(5) == {"STATUS": "loading READY=1 done"}


def test_a_failure_crosses_with_its_class_and_exit_status(listener: NotifyListener) -> None:
    error = errors.MemoryShortError('"8 GiB" needed\n1 GiB free in /dev/\udcff', "stop something")
    telling(listener).failed(error)
    fields = listener.receive(5)
    assert fields is not None
    assert fields["STATUS"] == 'failed: "8 GiB" needed 1 GiB free in /dev/\\udcff'
    assert json.loads(fields[notify.ERROR_FIELD])["exit_status"] == 6
    got = reported_error(fields)
    assert isinstance(got, errors.MemoryShortError)
    assert got.to_dict() == error.to_dict() | {"message": '"8 GiB" needed 1 GiB free in /dev/\\udcff'}


@pytest.mark.parametrize("letter", ["x", "é", '"', "\x01"])
def test_long_texts_are_shortened_so_that_systemd_takes_the_datagram(listener: NotifyListener, letter: str) -> None:
    telling(listener).failed(errors.SourceError(letter * 100_000, letter * 100_000))
    fields = listener.receive(5)
    assert fields is not None
    whole = "\n".join(f"{name}={value}" for name, value in fields.items())
    assert len(whole.encode()) < notify.MAX_DATAGRAM_BYTES
    got = reported_error(fields)
    assert isinstance(got, errors.SourceError)
    assert got.message.startswith(letter * 100)
    assert got.message.endswith("…")
    assert fields["STATUS"].endswith("…")


@pytest.mark.parametrize("fields", [{}, {"X_FTD_ERROR": ""}, {"X_FTD_ERROR": "{"}, {"X_FTD_ERROR": "[1]"}])
def test_what_is_no_error_is_none(fields: dict[str, str]) -> None:
    assert reported_error(fields) is None


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier.from_environ({})
    assert notifier == Notifier(address=None, watchdog_s=None)
    assert notifier.ready("x")
    assert notifier.failed(errors.InternalError("x"))


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", "/" + "x" * 120, "@" + "x" * 120])
def test_an_address_of_another_kind_means_nobody(address: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Notifier.from_environ({"NOTIFY_SOCKET": address}).address is None
    assert "nobody will be notified" in caplog.text


def test_a_manager_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    missing = Notifier.from_environ({"NOTIFY_SOCKET": str(tmp_path / "s")})
    assert not missing.ready("x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "s"))
    assert not missing.ready("x")


def test_a_manager_that_does_not_read_never_blocks_and_hears_later(listener: NotifyListener) -> None:
    notifier = telling(listener)
    sent = 0
    while notifier.status(str(sent)):
        sent += 1
        assert sent < 100_000
    assert not notifier.ready("now")
    assert [listener.receive(0) for _ in range(sent)] == [{"STATUS": str(number)} for number in range(sent)]
    assert notifier.ready("now")
    assert listener.receive(5) == {"READY": "1", "STATUS": "now"}


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": ""}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_PID": str(os.getpid())}, None),
        ({}, None),
    ],
)
def test_the_watchdogs_interval_is_ours_or_none(
    environ: dict[str, str], seconds: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert Notifier.from_environ(environ).watchdog_s == seconds
    assert caplog.text == ""


@pytest.mark.parametrize(
    "environ",
    [
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "1e6"},
        {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "me"},
    ],
)
def test_a_malformed_watchdog_is_none_with_a_log_line(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert Notifier.from_environ(environ).watchdog_s is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "make no sense: no watchdog" in record.getMessage()


def test_a_child_does_not_inherit_the_manager() -> None:
    environ = {"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "FTD_CONFIG": "/c"}
    assert without_manager(environ) == {"FTD_CONFIG": "/c"}
    assert len(environ) == 4


def test_the_listeners_directory_is_private_and_goes_with_it() -> None:
    with NotifyListener() as listener:
        directory = Path(listener.address).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


def test_a_deep_temporary_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with NotifyListener() as listener:
        assert telling(listener).ready("x")
        assert listener.receive(5) == {"READY": "1", "STATUS": "x"}


def test_an_address_that_is_taken_is_an_os_error(tmp_path: Path) -> None:
    with NotifyListener(str(tmp_path / "s")), pytest.raises(OSError, match="in use"):
        NotifyListener(str(tmp_path / "s"))


def test_datagrams_of_strangers_are_decoded_as_far_as_they_make_sense() -> None:
    with NotifyListener() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for data in (b"READY=1\n\nnonsense\nA=b=c\n=\nX=\xff", b"", b"\0" * 9000):
            stranger.sendto(data, listener.address)
        assert listener.receive(5) == {"READY": "1", "A": "b=c", "": "", "X": "\ufffd"}
        assert listener.receive(5) == {}
        assert listener.receive(5) == {}
