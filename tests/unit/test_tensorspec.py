import pytest

from ftd.tensorspec import TensorSpec


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F32", (), 4), ("BF16", (3, 5), 30), ("U8", (0, 7), 0), ("BOOL", (3,), 3), ("C64", (2,), 16),
        ("F64", (2,), 16), ("F4", (3, 2), 3), ("F6_E2M3", (4,), 3), ("F8_E4M3", (1 << 40,), 1 << 40),
    ],
)  # fmt: skip
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec("a", dtype, shape).nbytes == nbytes


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F6_E3M2", (2, 3))])
def test_elements_that_do_not_fill_whole_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        _ = TensorSpec("a", dtype, shape).nbytes
