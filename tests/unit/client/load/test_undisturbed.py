"""The interpreter's state during loads, and after the last of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from ftd_client.load.undisturbed import undisturbed


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    gc.enable()
    sys.setswitchinterval(interval_s)


def test_the_last_one_out_puts_everything_back() -> None:
    interval_s = sys.getswitchinterval()
    undisturbed.__enter__()
    undisturbed.__enter__()
    assert not gc.isenabled()
    assert sys.getswitchinterval() < interval_s
    undisturbed.__exit__()
    assert not gc.isenabled()
    undisturbed.__exit__()
    assert gc.isenabled()
    assert sys.getswitchinterval() == interval_s


def test_an_error_passes_and_a_choice_of_the_user_stays() -> None:
    gc.disable()
    sys.setswitchinterval(0.01)
    with pytest.raises(KeyError), undisturbed:
        raise KeyError
    assert not gc.isenabled()
    assert sys.getswitchinterval() == pytest.approx(0.01)
