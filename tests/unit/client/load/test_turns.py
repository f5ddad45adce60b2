"""The interpreter's interval during loads, and after the last of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from ftd_client.load.turns import short_turns


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def test_the_last_one_out_puts_it_back() -> None:
    sys.setswitchinterval(0.01)
    short_turns.__enter__()
    short_turns.__enter__()
    assert sys.getswitchinterval() < 0.001
    short_turns.__exit__()
    assert sys.getswitchinterval() < 0.001
    short_turns.__exit__()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_an_error_passes() -> None:
    before_s = sys.getswitchinterval()
    with pytest.raises(KeyError), short_turns:
        raise KeyError
    assert sys.getswitchinterval() == before_s
