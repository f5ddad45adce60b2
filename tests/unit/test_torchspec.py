"""Element types as torch has them, F4 in pairs; what a torch lacks is named with the release that has it."""

import pytest
import torch

from ftd import torchspec
from ftd.errors import BindError
from ftd.tensorspec import DTYPE_BITS, TensorSpec
from ftd.torchspec import torch_dtype, torch_form

#: No torch has these.
NOWHERE = {"F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("name", sorted(set(DTYPE_BITS) - NOWHERE))
def test_sizes_agree(name: str) -> None:
    """ST-21."""
    spec = TensorSpec("a", name, (3, 4))
    try:
        dtype, shape = torch_form(spec)
    except BindError as error:
        assert name in error.message and "use torch 2." in error.remedy
        return
    assert torch.Size(shape).numel() * dtype.itemsize == spec.nbytes


@pytest.mark.parametrize("name", sorted(NOWHERE))
def test_a_type_that_no_torch_has(name: str) -> None:
    """ST-21."""
    with pytest.raises(BindError) as caught:
        torch_form(TensorSpec("w", name, (4,)))
    assert f"'w' has element type {name}, which torch {torch.__version__} lacks" in caught.value.message
    assert caught.value.remedy == "convert the checkpoint"


def test_an_older_torch_is_told_which_one_has_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-21."""
    for name, release in (("F8_E8M0", "2.7"), ("F4", "2.8")):
        monkeypatch.delitem(torchspec._TYPES, name, raising=False)
        with pytest.raises(BindError) as caught:
            torch_dtype(name, "w")
        assert caught.value.remedy == f"use torch {release} or newer, or convert the checkpoint"


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no 4-bit type")
def test_pairs_of_four_bits() -> None:
    assert torch_form(TensorSpec("w", "F4", (3, 8))) == (torch.float4_e2m1fn_x2, (3, 4))
    assert torch_form(TensorSpec("w", "F4", (2, 0))) == (torch.float4_e2m1fn_x2, (2, 0))
    for shape in ((2, 3), (6, 1), ()):
        with pytest.raises(BindError, match="4-bit elements, which torch keeps in pairs"):
            torch_form(TensorSpec("w", "F4", shape))
