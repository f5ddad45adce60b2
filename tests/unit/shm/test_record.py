"""The double record: a reader gets a whole payload, whenever and however its writer stops."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.shm.record import HEAD_BYTES, DoubleRecord, decode_copy, encode_copy

COPY = 128
AT = 64  # records don't start at the start of their file
PAYLOADS = st.binary(max_size=COPY - HEAD_BYTES)

#: `encode_copy(1, b"abc", 32)`: sequence, length, zero, digest, payload, padding.
GOLDEN_COPY = bytes.fromhex("0100000000000000 03000000 00000000 e07c01131398f2b0 616263 0000000000")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, AT + 2 * COPY)
    yield fd
    os.close(fd)


def _record(fd: int) -> DoubleRecord:
    return DoubleRecord(fd, AT, COPY)


def test_golden_copy() -> None:
    assert encode_copy(1, b"abc", 32) == GOLDEN_COPY
    assert decode_copy(GOLDEN_COPY) == (1, b"abc")


@given(st.integers(1, 2**64 - 1), PAYLOADS)
def test_round_trip(sequence: int, payload: bytes) -> None:
    copy = encode_copy(sequence, payload, COPY)
    assert len(copy) == COPY
    assert decode_copy(copy) == (sequence, payload)


def test_a_payload_that_fills_the_copy_is_the_longest() -> None:
    full = bytes(COPY - HEAD_BYTES)
    assert decode_copy(encode_copy(1, full, COPY)) == (1, full)
    with pytest.raises(ValueError, match="payload of 105 bytes: expected at most 104"):
        encode_copy(1, full + b"x", COPY)


def test_every_damaged_byte_that_counts_is_seen() -> None:
    copy = encode_copy(7, b"weights", 40)
    for at in (*range(12), *range(16, HEAD_BYTES + 7)):  # 12 to 15 are reserved; the rest is padding
        for bit in range(8):
            damaged = bytearray(copy)
            damaged[at] ^= 1 << bit
            assert decode_copy(bytes(damaged)) is None, (at, bit)


@given(st.binary(max_size=2 * COPY))
def test_garbage_is_no_copy(data: bytes) -> None:
    assert decode_copy(data) is None


def test_sequences_start_at_one() -> None:
    """Zero is what was never written, whatever checksum stands beside it."""
    assert decode_copy(encode_copy(0, b"abc", COPY)) is None


def test_what_was_never_written_is_none(fd: int) -> None:
    assert _record(fd).read() is None
    os.ftruncate(fd, AT)  # shorter than the record, and then shorter than its offset
    assert _record(fd).read() is None
    os.ftruncate(fd, 0)
    assert _record(fd).read() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=2 * COPY, max_size=2 * COPY), payload=PAYLOADS)
def test_a_reader_of_garbage_gets_none_and_a_writer_gets_over_it(fd: int, garbage: bytes, payload: bytes) -> None:
    os.pwrite(fd, garbage, AT)
    assert _record(fd).read() is None
    writer = _record(fd)
    writer.write(payload)
    assert _record(fd).read() == payload


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PAYLOADS, min_size=1, max_size=6), st.integers(0, 5))
def test_the_last_write_is_read_also_after_a_change_of_writers(fd: int, payloads: list[bytes], change: int) -> None:
    os.pwrite(fd, bytes(2 * COPY), AT)
    writer = _record(fd)
    for number, payload in enumerate(payloads):
        if number == change:
            writer = _record(fd)
        writer.write(payload)
        assert _record(fd).read() == writer.read() == payload


def test_writes_alternate_so_that_the_copy_before_stands(fd: int) -> None:
    writer = _record(fd)
    for number in range(1, 6):
        writer.write(str(number).encode())
        found = {decode_copy(os.pread(fd, COPY, AT + i * COPY)) for i in (0, 1)}
        before = (number - 1, str(number - 1).encode()) if number > 1 else None
        assert found == {(number, str(number).encode()), before}


def test_nothing_around_the_record_is_touched(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"\xaa" * (AT + 2 * COPY + AT), 0)
    writer = _record(fd)
    writer.write(b"one")
    writer.write(b"two")
    data = os.pread(fd, 4096, 0)
    assert (data[:AT], data[AT + 2 * COPY :]) == (b"\xaa" * AT, b"\xaa" * AT)


@pytest.mark.parametrize("written_before", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 57, COPY - HEAD_BYTES])
def test_a_writer_that_dies_at_any_byte_leaves_the_payload_before(fd: int, written_before: int, length: int) -> None:
    writer = _record(fd)
    for number in range(written_before):
        writer.write(bytes([number + 1]) * 33)
    old, new = bytes([written_before]) * 33, b"\xff" * length
    whole = os.pread(fd, AT + 2 * COPY, 0)
    sequence = written_before + 1
    copy = encode_copy(sequence, new, COPY)
    at = AT + sequence % 2 * COPY
    for died_at in range(COPY + 1):
        os.pwrite(fd, whole, 0)
        os.pwrite(fd, copy[:died_at], at)
        read = _record(fd).read()
        # an empty payload ends with its digest; before that, only the old one may be seen
        assert read == (new if died_at >= HEAD_BYTES + length else old), died_at
        next_writer = _record(fd)
        next_writer.write(b"after")
        assert _record(fd).read() == b"after"


def test_a_write_that_fails_leaves_the_payload_before_and_can_be_repeated(fd: int, tmp_path: Path) -> None:
    _record(fd).write(b"before")
    read_only = os.open(tmp_path / "record", os.O_RDONLY)
    try:
        refused = DoubleRecord(read_only, AT, COPY)
        for _ in range(2):
            with pytest.raises(OSError, match="Bad file descriptor"):
                refused.write(b"after")
        assert refused.read() == b"before"
    finally:
        os.close(read_only)
    _record(fd).write(b"after")
    assert decode_copy(os.pread(fd, COPY, AT)) == (2, b"after")


def test_a_payload_that_is_too_long_changes_nothing(fd: int) -> None:
    writer = _record(fd)
    writer.write(b"before")
    with pytest.raises(ValueError, match="payload of 128 bytes"):
        writer.write(bytes(COPY))
    assert writer.read() == b"before"
    writer.write(b"after")
    assert _record(fd).read() == b"after"


def test_a_sequence_that_somebody_ran_to_its_end_stops_no_writer(fd: int) -> None:
    """Slots are written by followers; the next holder of a slot must get over whatever stands there."""
    for at in (0, 1):
        os.pwrite(fd, encode_copy(2**64 - 1, b"hostile", COPY), AT + at * COPY)
    writer = _record(fd)
    writer.clear()
    assert writer.read() is None
    writer.write(b"mine")
    assert _record(fd).read() == b"mine"


def test_the_head_is_24_bytes() -> None:
    assert HEAD_BYTES == struct.calcsize("<QII8s") == 24
