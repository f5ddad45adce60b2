"""What this release does not build is accepted by the configuration and refused by name."""

import pytest

from ftd._version import __version__
from ftd.config.later import LATER, refuse_unbuilt
from ftd.config.offload import OffloadConfig
from ftd.errors import NotBuiltError


def test_the_table_holds_the_defaults():
    assert {key: getattr(OffloadConfig(), key) for key in LATER} == LATER
    refuse_unbuilt(OffloadConfig(enabled=False, transfer_mode="strategy", profile_mode="torch_function"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("external_compile", True),
        ("offload_timing", "eager"),
        ("offload_timing", "cuda_graph"),
        ("piecewise_prefetch", "off"),
        ("piecewise_prefetch", "error"),
    ],
)
def test_each_is_refused_by_name(key, value):
    with pytest.raises(NotBuiltError) as caught:
        refuse_unbuilt(OffloadConfig(**{key: value}))
    assert str(caught.value) == (
        f"{key}: {value!r} is not built yet in ftd {__version__}; expected {LATER[key]!r}\n  → leave out {key}"
    )


def test_all_are_refused_at_once():
    with pytest.raises(NotBuiltError) as caught:
        refuse_unbuilt(OffloadConfig(external_compile=True, offload_timing="eager", piecewise_prefetch="off"))
    assert caught.value.remedy == "leave out external_compile, offload_timing and piecewise_prefetch"
    assert caught.value.message.count("is not built yet") == 3
