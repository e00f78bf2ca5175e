# SPDX-License-Identifier: BSD-3-Clause
"""The int4 reference codec: bytes, rounding, quality, and what it refuses."""

import pytest
import torch

from vllm_superl8.formats import blocks, int4
from vllm_superl8.formats.layout import LAYOUTS

from tolerances import Quality

SCHEMES = [(True, "int4"), (False, "int4_zero")]


def normal(n, k):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) + 0.2
    w[:, ::64] *= 5
    return w


def test_int4_puts_the_even_column_into_the_low_half():
    packed = int4.pack(torch.tensor([[1, 2, 15, 0]]))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert int4.unpack(packed).tolist() == [[1, 2, 15, 0]]


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
@pytest.mark.parametrize(("symmetric", "name"), SCHEMES)
def test_int4_is_off_by_half_a_step_at_most(symmetric, name, group_size, scale_dtype):
    w = normal(6, 384)
    planes = int4.quantize(w, group_size, symmetric, scale_dtype)
    blocks.check_planes(planes, LAYOUTS[name], 384)
    assert planes[1].dtype == scale_dtype
    error = (int4.dequantize(planes) - w).abs().unflatten(1, (-1, group_size)).amax(-1)
    assert (error <= planes[1].float() * (0.51 if scale_dtype == torch.float32 else 0.52)).all()
    assert Quality.of(int4.dequantize(planes), w).sqnr_db > 11


@pytest.mark.parametrize(("symmetric", "name"), SCHEMES)
def test_int4_blocks_are_worth_the_same(symmetric, name):
    planes = int4.quantize(normal(5, 256), 128, symmetric)
    got = blocks.dequantize(planes, LAYOUTS[name])
    assert torch.allclose(got, int4.dequantize(planes), rtol=0, atol=1e-6)
    assert got.abs().max() > 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_keeps_zeros_exact(symmetric):
    w = normal(2, 64)
    w[:, ::3] = 0
    w[1] = 0
    back = int4.dequantize(int4.quantize(w, 32, symmetric))
    assert not back[:, ::3].any() and not back[1].any() and back[0].any()


def test_int4_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="codes from 0 to 16, wanted 0 to 15"):
        int4.pack(torch.tensor([0, 16]))
    with pytest.raises(ValueError, match="rows of 3 codes, wanted an even number"):
        int4.pack(torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="group_size 48 for rows of 96"):
        int4.quantize(torch.ones(1, 96), 48)
    planes = int4.quantize(torch.ones(2, 128), 64)
    for wrong, k in ((planes, 256), (planes[:1], 128), ([planes[0], planes[1].double()], 128)):
        with pytest.raises(ValueError, match="int4: planes are"):
            blocks.check_planes(wrong, LAYOUTS["int4"], k)
    with pytest.raises(ValueError, match=r"int4_zero: planes are .* zeros"):
        blocks.check_planes(planes, LAYOUTS["int4_zero"], 128)
