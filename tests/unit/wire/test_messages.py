"""Requests and replies: round trips, versions, types, and errors that cross by their code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd import errors
from ftd._version import PROTOCOL
from ftd.errors import FrameError, FtdError, ProtocolMismatchError
from ftd.packing import pack, unpack
from ftd.wire.messages import Reply, Request, unknown_op

ARGS = st.dictionaries(st.text(), st.none() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(), max_size=5)
ERRORS = sorted(FtdError._by_code.values(), key=lambda kind: kind.code)


def over_the_wire(fields: dict[str, object]) -> dict[str, object]:
    return unpack(pack(fields))


@given(st.text(), ARGS)
def test_requests_round_trip(op: str, args: dict[str, object]) -> None:
    request = Request(op, args)
    assert Request.from_map(over_the_wire(request.to_map())) == request


@given(ARGS)
def test_results_round_trip(result: dict[str, object]) -> None:
    assert Reply.from_map(over_the_wire(Reply(result).to_map())) == Reply(result)


@given(st.sampled_from(ERRORS), st.text(), st.text())
def test_errors_round_trip_by_their_code(kind: type[FtdError], message: str, remedy: str) -> None:
    sent = kind.restore(message, remedy)
    got = Reply.from_map(over_the_wire(Reply(error=sent).to_map())).error
    assert type(got) is kind
    assert (got.to_dict(), got.exit_status) == (sent.to_dict(), sent.exit_status)


def test_every_message_says_the_version() -> None:
    for fields in (Request("x").to_map(), Reply().to_map(), Reply(error=errors.InternalError("x")).to_map()):
        assert fields["v"] == list(PROTOCOL)


def test_a_file_name_that_is_no_utf8_can_still_be_named() -> None:
    sent = errors.SourceError("/models/\udcff.safetensors is cut short")
    got = Reply.from_map(over_the_wire(Reply(error=sent).to_map())).error
    assert got is not None
    assert got.message == "/models/\\udcff.safetensors is cut short"


def test_another_major_is_refused_with_both_versions_whatever_else_it_says() -> None:
    theirs = PROTOCOL[0] + 1
    with pytest.raises(ProtocolMismatchError, match=rf"speaks protocol {theirs}\.7: expected 1\.x, ours is 1\.1"):
        Request.from_map({"v": [theirs, 7], "verb": "status"})
    with pytest.raises(ProtocolMismatchError):
        Reply.from_map({"v": [theirs, 7]})


def test_another_minor_and_its_new_fields_are_accepted() -> None:
    fields = {"v": [PROTOCOL[0], PROTOCOL[1] + 5], "op": "status", "args": {}, "trace": b"new"}
    assert Request.from_map(fields) == Request("status")


@pytest.mark.parametrize("version", [None, 1, "1.0", [], [1], [1, 0, 0], ["1", "0"], [True, 0], [-1, 0], [1.0, 0]])
def test_a_version_of_another_type_is_a_frame_error(version: object) -> None:
    with pytest.raises(FrameError):
        Request.from_map({"v": version, "op": "status", "args": {}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"op": 5}, "'op' is int: expected str"),
        ({"op": None}, "'op' is NoneType"),
        ({"args": []}, "'args' is list: expected dict"),
        ({"args": b"x"}, "'args' is bytes"),
    ],
)
def test_a_request_field_of_another_type_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(FrameError, match=named):
        Request.from_map({"v": list(PROTOCOL), "op": "status", "args": {}} | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(FrameError, match="'args' is nothing: expected dict"):
        Request.from_map({"v": list(PROTOCOL), "op": "status"})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"result": {}, "error": {"code": "x", "message": "x", "remedy": ""}},
        {"result": []},
        {"error": "broken"},
        {"error": {"code": "x", "message": "x"}},
        {"error": {"code": 1, "message": "x", "remedy": ""}},
    ],
    ids=["neither", "both", "list", "text", "no-remedy", "int-code"],
)
def test_a_malformed_reply_is_a_frame_error(fields: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        Reply.from_map({"v": list(PROTOCOL)} | fields)


def test_a_code_of_a_newer_peer_becomes_a_plain_error() -> None:
    fields = {"v": list(PROTOCOL), "error": {"code": "of_tomorrow", "message": "m", "remedy": "r"}}
    error = Reply.from_map(fields).error
    assert type(error) is FtdError
    assert (error.message, error.remedy) == ("m", "r")


def test_an_unknown_operation_lists_the_known_ones() -> None:
    error = unknown_op("dance", ["stop", "status"])
    assert error.code == "control"
    assert error.message == "unknown operation 'dance': expected one of status, stop"
