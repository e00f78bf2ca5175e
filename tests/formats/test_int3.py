# SPDX-License-Identifier: BSD-3-Clause
"""The int3 reference codec: bit-planes as .superl8 files have them, rounding, and what it refuses."""

import pytest
import torch

from vllm_superl8.formats import blocks, int3
from vllm_superl8.formats.layout import LAYOUTS


def test_int3_is_three_words_of_bit_planes():
    codes = torch.randint(0, 8, (4, 64), generator=torch.Generator().manual_seed(0))
    words = int3.pack(codes).view(torch.int32).long().unflatten(1, (2, 3))  # qs0, qs1, hp
    for value in range(32):
        lane, s = value & 3, value >> 2
        low = words[..., s // 4] >> (8 * lane + 2 * (s % 4)) & 3
        high = words[..., 2] >> (8 * lane + s) & 1  # the sign bit of code - 4, inverted
        assert torch.equal(low | high << 2, codes.unflatten(1, (2, 32))[..., value])


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", int3.GROUP_SIZES)
def test_int3_is_off_by_half_a_step_or_by_what_7_codes_cannot_reach(group_size, scale_dtype):
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    weight[:, ::3] = 0
    planes = int3.quantize(weight, group_size, scale_dtype)
    blocks.check_planes(planes, LAYOUTS["int3"], 256)
    error = (blocks.dequantize(planes, LAYOUTS["int3"]) - weight).abs()
    limit = planes[1].float().repeat_interleave(group_size, 1) * 0.51
    assert (error <= limit).all() and (error > limit * 0.9).any()
    assert not error[:, ::3].any()


def test_int3_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="codes from 0 to 8, wanted 0 to 7"):
        int3.pack(torch.arange(64).clamp(max=8).view(2, 32))
    with pytest.raises(ValueError, match="group_size 48 for rows of 96"):
        int3.quantize(torch.ones(1, 96), 48)
    planes = int3.quantize(torch.ones(2, 128), 64)
    with pytest.raises(ValueError, match="int3: planes are"):
        blocks.check_planes(planes, LAYOUTS["int3"], 256)
    with pytest.raises(ValueError, match="int4: planes are"):
        blocks.check_planes(planes, LAYOUTS["int4"], 128)
