import pytest

from ftd._version import PROTOCOL
from ftd.errors import ProtocolMismatchError, SegmentError
from ftd.shm import header
from ftd.shm.header import HEADER_BYTES, check_header, encode_header

MAGIC = b"ftdcoord"


def _check(data: bytes) -> None:
    check_header(data, MAGIC, 4096, "/ftd.a.coord")


def test_round_trip() -> None:
    assert len(encode_header(MAGIC, 4096)) == HEADER_BYTES == 16
    _check(encode_header(MAGIC, 4096) + b"more")


def test_a_higher_minor_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "PROTOCOL", (PROTOCOL[0], PROTOCOL[1] + 7))
    data = encode_header(MAGIC, 4096)
    monkeypatch.undo()
    _check(data)


@pytest.mark.parametrize("major", [PROTOCOL[0] - 1, PROTOCOL[0] + 1])
def test_another_major_version_is_refused_with_both(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(header, "PROTOCOL", (major, 4))
    data = encode_header(MAGIC, 4096)
    monkeypatch.undo()
    ours = f"{PROTOCOL[0]}.{PROTOCOL[1]}"
    with pytest.raises(ProtocolMismatchError, match=rf"/ftd\.a\.coord speaks protocol {major}.4, .* speaks {ours}"):
        _check(data)


def test_another_length_is_refused() -> None:
    with pytest.raises(SegmentError, match=r"/ftd\.a\.coord says that it holds 8192 bytes: expected 4096"):
        _check(encode_header(MAGIC, 8192))


@pytest.mark.parametrize(
    "data", [b"", b"ftd", encode_header(MAGIC, 4096)[:-1], bytes(16), encode_header(b"ftdslots", 4096)]
)
def test_what_is_no_segment_of_ftd_is_refused(data: bytes) -> None:
    with pytest.raises(SegmentError, match=r"/ftd\.a\.coord is no segment of ftd: found b.*, expected b'ftdcoord'"):
        _check(data)
