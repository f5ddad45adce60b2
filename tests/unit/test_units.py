import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("4096", 4096), ("4096B", 4096), ("1KiB", 1024), ("8GiB", 8 << 30), ("1.5 GB", 1_500_000_000),
        ("1kb", 1000), ("2 MB", 2_000_000), ("2mib", 2 << 20), ("1TiB", 1 << 40), ("1 TB", 10**12),
        (" 3 GiB ", 3 << 30), ("0.5KiB", 512), ("1.0000001GB", 1_000_000_100), ("007", 7),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "+1", "1e9", "1..5", ".5", "5.", "1 G", "1 PiB", "1 GiB x", "0x10", "1_000", "١", "inf"],
)
def test_what_is_no_size_names_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"):
        parse_bytes(text)


@given(st.integers(0, 2**70))
def test_no_byte_is_lost_above_the_floats(count: int) -> None:
    assert parse_bytes(str(count)) == count
    assert parse_bytes(f"{count} KiB") == 1024 * count


@given(st.integers(0, 2**50))
def test_a_formatted_size_parses_back_to_nearly_itself(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= count // 190


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (8589934592, "8.00 GiB"), (1 << 40, "1.00 TiB"),
     (5 << 50, "5120.00 TiB"), (1.5 * 2**20, "1.50 MiB"), (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_sizes_as_people_read_them(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (0.0000421, "42 µs"), (0.0042, "4.2 ms"), (1, "1.0 s"), (59.9, "59.9 s"), (75, "1 min 15 s"),
     (3600, "1 h 0 min"), (86399, "23 h 59 min"), (90000, "1 d 1 h")],
)  # fmt: skip
def test_times_as_people_read_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
