# SPDX-License-Identifier: BSD-3-Clause
"""act_and_mul_quantize: what act_and_mul and quantize_int8 give, bit for bit."""

import pytest
import torch

from vllm_superl8.ops import act_quantize
from vllm_superl8.ops.activation import GATED
from vllm_superl8.ops.registry import OPS

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def data(rows, n, *, dtype, device):
    """(rows, 2 n) normal values of standard deviation 2, with outlier columns and a row of zeros (the second)."""
    x = torch.randn(rows, 2 * n, generator=torch.Generator().manual_seed(n)) * 2 + 0.5
    x[..., ::16] *= 10
    x[1:2] = 0
    return x.to(device, dtype)


def separately(kernels, x, activation, parameters=(), group_size=-1):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    kernels.run("act_and_mul", out, x, activation, *parameters)
    return kernels.run("quantize_int8", out, group_size)


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize(("n", "group_size"), [(33, -1), (64, 32)])
def test_act_and_mul_quantize_is_act_and_mul_then_quantize_int8(kernels, n, group_size, activation, dtype):
    x = data(3, n, dtype=dtype, device=kernels.device)
    parameters = (1.3, 2.5, 0.5)
    got = kernels.run("act_and_mul_quantize", x, activation, *parameters, group_size)
    assert_same(got, separately(kernels, x, activation, parameters, group_size))


@pytest.mark.parametrize("dtype", DTYPES)
# around a thread's 8 elements, the 4096 of a block's step, the 12032 and 24064 that shared memory holds
@pytest.mark.parametrize(("n", "group_size"), [(1, -1), (4104, -1), (12032, -1), (12040, -1), (24072, -1), (4224, 128)])
def test_act_and_mul_quantize_takes_any_size(kernels, n, group_size, dtype):
    x = data(2, n, dtype=dtype, device=kernels.device)
    got = kernels.run("act_and_mul_quantize", x, "silu", group_size=group_size)
    assert_same(got, separately(kernels, x, "silu", group_size=group_size))


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("offset", [8, 3])  # rows that start on 16 bytes, and that do not
def test_act_and_mul_quantize_takes_strided_rows_and_more_dimensions(kernels, offset, group_size):
    x = data(6, 80, dtype=torch.float16, device=kernels.device).view(2, 3, 160)[..., offset : offset + 128]
    got = kernels.run("act_and_mul_quantize", x, "gelu_tanh", group_size=group_size)
    assert got[0].shape == (2, 3, 64)
    assert_same(got, separately(kernels, x, "gelu_tanh", group_size=group_size))


@pytest.mark.parametrize("group_size", [-1, 32])
def test_act_and_mul_quantize_shows_what_is_not_finite(kernels, group_size):
    x = data(3, 96, dtype=torch.float32, device=kernels.device)
    x[2, 40] = float("nan")
    _, scales = kernels.run("act_and_mul_quantize", x, "silu", group_size=group_size)
    assert torch.isfinite(scales[:2]).all() and scales[2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_and_mul_quantize_matches_its_reference_within_a_code(kernels, dtype):
    x = data(4, 256, dtype=dtype, device=kernels.device)
    codes, scales = kernels.run("act_and_mul_quantize", x, "silu", group_size=128)
    want_codes, want_scales = OPS["act_and_mul_quantize"].reference(x, "silu", group_size=128)
    difference = (codes.int() - want_codes.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.01
    assert ((scales - want_scales).abs() / want_scales).max() < 2 * torch.finfo(dtype).eps


def test_act_and_mul_quantize_takes_no_rows_and_is_deterministic(kernels):
    x = data(5, 600, dtype=torch.bfloat16, device=kernels.device)
    assert kernels.run("act_and_mul_quantize", x[:0], "silu")[0].shape == (0, 600)
    first = kernels.run("act_and_mul_quantize", x, "silu")
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert_same(first, kernels.run("act_and_mul_quantize", x, "silu"))


def test_act_and_mul_quantize_refuses_what_does_not_fit(kernels):
    x = torch.ones(2, 96, device=kernels.device)
    with pytest.raises(ValueError, match="act_and_mul_quantize: group_size is 32 for rows of 48"):
        kernels.run("act_and_mul_quantize", x, "silu", group_size=32)
    with pytest.raises(ValueError, match="there is none called 'relu2'; known are silu, gelu"):
        kernels.run("act_and_mul_quantize", x, "relu2")
    with pytest.raises(ValueError, match="rows of 95 have no two halves"):
        kernels.run("act_and_mul_quantize", x[:, :95], "silu")


def test_the_longest_rows_are_those_that_the_kernel_takes(kernels):
    n = act_quantize.MOST_ROW_BYTES // 4 + 8
    with pytest.raises(ValueError, match="a row has 48160 bytes, wanted 48128 at most"):
        kernels.module.act_and_mul_quantize("silu", "fp32", 0, 0, 0, 1, n, 2 * n, 0.0, 0.0, 0.0, 0, 0)


@pytest.mark.parametrize("group_size", [-1, 32])
def test_act_and_mul_quantize_fake_has_the_shapes_of_the_result(group_size):
    x = torch.ones(2, 3, 192)
    real = OPS["act_and_mul_quantize"].reference(x, "silu", group_size=group_size)
    fake = OPS["act_and_mul_quantize"].fake(x, "silu", group_size=group_size)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
