import logging
from collections.abc import Callable
from typing import Any

import pytest

import ftd_client.profile_exchange as client
from ftd.errors import AccessError, ControlError, FrameError, FtdError, InternalError, NotRunningError
from ftd.plan.profile import encode
from ftd.plan.strictjson import ProfileError
from ftd.wire import profiles as wire
from ftd_client.profile_exchange import fetch, offer
from tests.unit.plan.profiles import IDENTITY, PROFILE, on

Answer = Callable[[Any], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Answer:
    """`answer(result or error)`: what the daemon says from now on."""
    caplog.set_level(logging.DEBUG, "ftd_client")

    def set_to(said: Any) -> None:
        def ask(*_: Any) -> Any:
            if isinstance(said, Exception):
                raise said
            return said

        monkeypatch.setattr(client, "_ask", ask)

    return set_to


def test_what_it_has_and_that_it_has_none(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    answer(wire.get_result(encode(PROFILE)))
    assert fetch("ns", IDENTITY) == PROFILE
    answer(wire.get_result(None))
    assert fetch("ns", IDENTITY) is None
    answer({})
    assert offer("ns", PROFILE)
    assert not caplog.records


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({}, "'profile' is NoneType"),
        ({"profile": 7}, "'profile' is int"),
        ({"profile": b"garbage"}, "is not deflated"),
        (wire.get_result(b"garbage"), "is not JSON"),
        (wire.get_result(encode(PROFILE)[:-2]), "is not JSON"),
        (wire.get_result(bytes(1 << 22)), "more than 2097152 bytes"),
        (wire.get_result(encode(on(torch="2.6.0"))), "gave was measured on something else: 1 difference"),
    ],
)
def test_an_answer_that_is_no_such_profile_is_a_warning(
    answer: Answer, caplog: pytest.LogCaptureFixture, result: dict[str, Any], reason: str
) -> None:
    answer(result)
    assert fetch("ns", IDENTITY) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no profile was fetched from 'ns': " in record.getMessage() and reason in record.getMessage()


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (NotRunningError("nobody"), "DEBUG"),
        (ControlError("unknown operation 'get_profile'"), "DEBUG"),
        (FrameError("nonsense"), "WARNING"),
        (AccessError("refused"), "WARNING"),
        (ProfileError("refused"), "WARNING"),
        (InternalError("broken"), "WARNING"),
        (FtdError("of a newer release"), "WARNING"),
        (PermissionError(13, "Permission denied"), "WARNING"),
    ],
)
def test_no_error_comes_out(answer: Answer, caplog: pytest.LogCaptureFixture, error: Exception, level: str) -> None:
    answer(error)
    assert fetch("ns", IDENTITY) is None
    assert not offer("ns", PROFILE)
    assert [record.levelname for record in caplog.records] == [level, level]


@pytest.mark.parametrize("namespace", ["nobody-has-this-one", "not a namespace", ""])
def test_nobody_is_no_error(namespace: str, runtime_dir: object) -> None:
    assert fetch(namespace, IDENTITY) is None
    assert not offer(namespace, PROFILE)
