# SPDX-License-Identifier: BSD-3-Clause
"""rms_norm_quantize and add_rms_norm_quantize: what the norm and quantize_int8 give, bit for bit."""

import pytest
import torch

from vllm_superl8.ops import norm_quantize  # noqa: F401  registers the ops
from vllm_superl8.ops.registry import OPS

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# n, group_size: around a thread's 8 elements, the 512 of a warp and the 8192 that stay in registers
ROWS = [(1, -1), (7, -1), (513, -1), (1024, -1), (8192, -1), (8202, -1), (32, 32), (192, 64), (640, 128), (8320, 128)]


def data(*shape, dtype, device, seed=0):
    """Normal values with mean 0.5, every 16th column thirty times as large."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    x[..., ::16] *= 30
    return x.to(device, dtype)


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "group_size"), ROWS)
def test_rms_norm_quantize_is_rms_norm_then_quantize_int8(kernels, n, group_size, dtype):
    x = data(3, n, dtype=dtype, device=kernels.device)
    weight = data(n, dtype=dtype, device=kernels.device, seed=1)
    got = kernels.run("rms_norm_quantize", x, weight, 1e-6, 0.0, group_size)
    normalised = kernels.run("rms_norm", x, weight, 1e-6)
    assert_same(got, kernels.run("quantize_int8", normalised, group_size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "group_size"), [(9, -1), (1000, -1), (8202, -1), (640, 128)])
@pytest.mark.parametrize("weight_dtype", ["x", "fp32", None])
def test_add_rms_norm_quantize_is_fused_add_rms_norm_then_quantize_int8(kernels, n, group_size, dtype, weight_dtype):
    x = data(2, n, dtype=dtype, device=kernels.device)
    residual = data(2, n, dtype=dtype, device=kernels.device, seed=2)
    weight = data(n, dtype=torch.float32 if weight_dtype == "fp32" else dtype, device=kernels.device, seed=1)
    weight = None if weight_dtype is None else weight
    before = residual.clone()
    codes, scales, total = kernels.run("add_rms_norm_quantize", x, residual, weight, 1e-5, 1.0, group_size)
    assert torch.equal(residual, before)
    normalised = kernels.run("fused_add_rms_norm", x, residual, weight, 1e-5, 1.0)
    assert_same((codes, scales), kernels.run("quantize_int8", normalised, group_size))
    assert torch.equal(total, residual)


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("offset", [8, 3])  # rows that start on 16 bytes, and that do not
def test_rms_norm_quantize_takes_strided_rows_and_more_dimensions(kernels, offset, group_size):
    x = data(2, 3, 136, dtype=torch.float16, device=kernels.device)[..., offset : offset + 96]
    got = kernels.run("rms_norm_quantize", x, None, 1e-6, 0.0, group_size)
    assert got[0].shape == (2, 3, 96) and got[1].shape == (2, 3, 1 if group_size == -1 else 3)
    assert_same(got, kernels.run("quantize_int8", kernels.run("rms_norm", x, None, 1e-6), group_size))


@pytest.mark.parametrize("group_size", [-1, 64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rms_norm_quantize_shows_what_is_not_finite(kernels, bad, group_size):
    x = data(2, 128, dtype=torch.float32, device=kernels.device)
    x[1, 5] = bad
    _, scales = kernels.run("rms_norm_quantize", x, None, 1e-6, 0.0, group_size)
    assert torch.isfinite(scales[0]).all() and not torch.isfinite(scales[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [-1, 128])
def test_rms_norm_quantize_matches_its_reference_within_a_code(kernels, group_size, dtype):
    x = data(4, 384, dtype=dtype, device=kernels.device)
    weight = data(384, dtype=dtype, device=kernels.device, seed=1)
    codes, scales = kernels.run("rms_norm_quantize", x, weight, 1e-6, 1.0, group_size)
    want_codes, want_scales = OPS["rms_norm_quantize"].reference(x, weight, 1e-6, 1.0, group_size)
    difference = (codes.int() - want_codes.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.01
    assert ((scales - want_scales).abs() / want_scales).max() < 2 * torch.finfo(dtype).eps


def test_rms_norm_quantize_takes_no_rows_and_is_deterministic(kernels):
    x = data(5, 600, dtype=torch.bfloat16, device=kernels.device)
    assert kernels.run("rms_norm_quantize", x[:0], None, 1e-6)[0].shape == (0, 600)
    first = kernels.run("rms_norm_quantize", x, None, 1e-6)
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert_same(first, kernels.run("rms_norm_quantize", x, None, 1e-6))
    assert_same((first[0][:2], first[1][:2]), kernels.run("rms_norm_quantize", x[:2], None, 1e-6))


def test_rms_norm_quantize_refuses_what_does_not_fit(kernels):
    x = torch.ones(2, 96, dtype=torch.float16, device=kernels.device)
    with pytest.raises(ValueError, match="rms_norm_quantize: group_size is 128 for rows of 96"):
        kernels.run("rms_norm_quantize", x, None, 1e-6, 0.0, 128)
    with pytest.raises(TypeError, match=r"weight is torch\.bfloat16 for x of torch\.float16, wanted that or float32"):
        kernels.run("rms_norm_quantize", x, x[0].bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"weight is \(95,\) for rows of 96"):
        kernels.run("rms_norm_quantize", x, x[0, 1:], 1e-6)
    with pytest.raises(ValueError, match=r"residual is \(1, 96\) torch\.float16 for x of \(2, 96\)"):
        kernels.run("add_rms_norm_quantize", x, x[:1], None, 1e-6)


@pytest.mark.parametrize("group_size", [-1, 32])
def test_fused_norms_fakes_have_the_shapes_of_the_results(group_size):
    x = torch.ones(2, 3, 96)
    for op, arguments in (("rms_norm_quantize", (x,)), ("add_rms_norm_quantize", (x, x))):
        real = OPS[op].reference(*arguments, None, 1e-6, 0.0, group_size)
        fake = OPS[op].fake(*arguments, None, 1e-6, 0.0, group_size)
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
