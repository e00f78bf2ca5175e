# SPDX-License-Identifier: BSD-3-Clause
"""rms_norm and fused_add_rms_norm."""

import pytest
import torch

from vllm_superl8.ops import norm  # noqa: F401  registers the ops
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# rows, n: around a thread's 8 elements, a warp's 512 and the 8192 that stay in registers
SHAPES = [(1, 1), (3, 31), (2, 32), (2, 33), (4, 256), (3, 511), (3, 513), (2, 1000), (1, 8192), (1, 8208)]


def data(*shape, dtype, device, seed=0):
    """Normal values with mean 0.5 and every 16th column thirty times as large."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    x[..., ::16] *= 30
    return x.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), SHAPES)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_matches_reference(kernels, rows, n, dtype, weight_offset):
    x = data(rows, n, dtype=dtype, device=kernels.device)
    weight = data(n, dtype=dtype, device=kernels.device, seed=1)
    got = kernels.run("rms_norm", x, weight, 1e-6, weight_offset)
    want = OPS["rms_norm"].reference(x.float(), weight.float(), 1e-6, weight_offset)
    assert got.dtype == dtype
    assert relative_error(got, want) < arithmetic_limit("rms_norm", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_no_weight_strided_rows_and_more_dimensions(kernels, dtype):
    x = data(2, 3, 80, dtype=dtype, device=kernels.device)[..., 8:72]
    got = kernels.run("rms_norm", x, None, 1e-5)
    want = OPS["rms_norm"].reference(x.float(), None, 1e-5)
    assert got.is_contiguous()
    assert relative_error(got, want) < arithmetic_limit("rms_norm", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [33, 264])
def test_rms_norm_takes_float32_weights(kernels, n, dtype):
    x = data(2, n, dtype=dtype, device=kernels.device)
    weight = data(n, dtype=torch.float32, device=kernels.device, seed=1)
    got = kernels.run("rms_norm", x, weight, 1e-6)
    assert got.dtype == dtype
    assert relative_error(got, OPS["rms_norm"].reference(x.float(), weight, 1e-6)) < arithmetic_limit("rms_norm", dtype)


def test_rms_norm_takes_no_rows(kernels):
    x = torch.empty(0, 64, device=kernels.device)
    assert kernels.run("rms_norm", x, None, 1e-6).shape == (0, 64)


def test_rms_norm_uses_eps_for_small_rows(kernels):
    x = torch.full((2, 64), 1e-4, device=kernels.device)
    got = kernels.run("rms_norm", x, None, 1e-6)
    want = OPS["rms_norm"].reference(x.double(), None, 1e-6)
    assert 0.09 < want.max() < 0.1  # eps dominates: without it the result is 1
    assert relative_error(got, want) < arithmetic_limit("rms_norm", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), SHAPES)
def test_fused_add_rms_norm_matches_reference(kernels, rows, n, dtype):
    x = data(rows, n, dtype=dtype, device=kernels.device)
    residual = data(rows, n, dtype=dtype, device=kernels.device, seed=2)
    weight = data(n, dtype=dtype, device=kernels.device, seed=1)
    total = (x.float() + residual.float()).to(dtype)
    got = kernels.run("fused_add_rms_norm", x, residual, weight, 1e-6)
    want = OPS["rms_norm"].reference(total.float(), weight.float(), 1e-6)
    assert torch.equal(residual, total)
    assert relative_error(got, want) < arithmetic_limit("rms_norm", dtype)


def test_fused_add_rms_norm_refuses_a_strided_residual(kernels):
    x = torch.ones(2, 8, device=kernels.device)
    with pytest.raises(ValueError, match=r"residual is not contiguous; pass residual\.contiguous"):
        kernels.run("fused_add_rms_norm", x, torch.ones(8, 2, device=kernels.device).T, None, 1e-6)


def test_rms_norm_is_deterministic(kernels):
    x = data(7, 777, dtype=torch.float32, device=kernels.device)
    first = kernels.run("rms_norm", x, None, 1e-6)
    for _ in range(4):  # the emulator resumes threads in another order each time
        assert torch.equal(first, kernels.run("rms_norm", x, None, 1e-6))
