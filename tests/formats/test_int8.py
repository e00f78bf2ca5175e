# SPDX-License-Identifier: BSD-3-Clause
"""The int8 reference codec against numpy's IEEE arithmetic, element by element."""

import numpy as np
import pytest
import torch

from vllm_superl8.formats import int8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def outliers(*shape, dtype=torch.float32, seed=0):
    """Normal values with mean 0.3 and every 64th column fifty times as large."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.3
    x[..., ::64] *= 50
    return x.to(dtype)


def oracle(x, group_size):
    """Codes and scales by numpy, one group at a time."""
    rows = x.float().numpy().reshape(-1, x.shape[-1])
    size = rows.shape[1] if group_size == -1 else group_size
    codes, scales = np.zeros(rows.shape, np.int8), np.zeros((rows.shape[0], rows.shape[1] // size), np.float32)
    for r, row in enumerate(rows):
        for g in range(scales.shape[1]):
            group = row[g * size : (g + 1) * size]
            scale = np.float32(np.abs(group).max()) / np.float32(127)
            scales[r, g] = scale if scale else 1
            codes[r, g * size : (g + 1) * size] = np.clip(np.rint(group / scales[r, g]), -127, 127)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "group_size"), [(1, -1), (7, -1), (384, -1), (384, 128), (384, 64), (96, 32)])
def test_int8_equals_numpy(k, group_size, dtype):
    x = outliers(2, 3, k, dtype=dtype)
    codes, scales = int8.quantize(x, group_size)
    want_codes, want_scales = oracle(x, group_size)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert np.array_equal(codes.numpy(), want_codes)
    assert np.array_equal(scales.numpy(), want_scales)
    assert codes.abs().max() == 127


def test_int8_rounds_half_to_even_and_never_to_minus_128():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    codes, scales = int8.quantize(x, -1)
    assert scales.item() == 1
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_int8_keeps_scales_that_fp16_cannot_hold():
    x = torch.tensor([[3e38, -1e38], [1e-38, 4e-39]])
    codes, scales = int8.quantize(x, -1)
    assert codes.tolist() == [[127, -42], [127, 51]]
    assert torch.equal(scales.flatten(), x.abs().amax(-1) / 127)


def test_int8_gives_zeros_the_scale_one():
    x = torch.zeros(2, 128)
    x[1, 64:] = 2
    codes, scales = int8.quantize(x, 64)
    assert scales[0].tolist() == [1, 1]
    assert scales[1, 0] == 1 and scales[1, 1] == torch.tensor(2.0) / 127
    assert not codes[0].any() and not codes[1, :64].any() and (codes[1, 64:] == 127).all()
    assert torch.equal(int8.dequantize(codes, scales)[0], x[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_shows_what_is_not_finite_in_the_scale_of_its_group(bad):
    x = torch.ones(1, 128)
    x[0, 70] = bad
    codes, scales = int8.quantize(x, 64)
    assert torch.isfinite(scales[0, 0]) and not torch.isfinite(scales[0, 1])
    assert not codes[0, 64:].any()
    assert int8.dequantize(codes, scales)[0, 64:].isnan().all()


@pytest.mark.parametrize("group_size", [-1, 32])
def test_int8_is_off_by_half_a_step_at_most(group_size):
    x = outliers(16, 256)
    codes, scales = int8.quantize(x, group_size)
    error = (int8.dequantize(codes, scales) - x).abs().unflatten(-1, (scales.shape[-1], -1)).amax(-1)
    assert (error <= scales * 0.5001).all()
    assert (error > scales * 0.3).any()


def test_int8_takes_no_rows():
    codes, scales = int8.quantize(torch.empty(0, 64), 32)
    assert codes.shape == (0, 64) and scales.shape == (0, 2)
    assert int8.dequantize(codes, scales).shape == (0, 64)


def test_int8_refuses_groups_that_do_not_divide_rows():
    with pytest.raises(ValueError, match="group_size 32 does not divide rows of 40"):
        int8.quantize(torch.ones(1, 40), 32)
    with pytest.raises(ValueError, match="3 scales a row do not divide rows of 40"):
        int8.dequantize(torch.ones(1, 40, dtype=torch.int8), torch.ones(1, 3))
