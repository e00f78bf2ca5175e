# SPDX-License-Identifier: BSD-3-Clause
"""w8a8_gemv, the kernel of w8a8_gemm for up to eight rows: every number of rows and of warps that share columns."""

import pytest
import torch

from vllm_superl8.ops import linear
from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, stream

from products import Operands, codes, integer_product, operands, product, scales
from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
K_WARPS = [1, 2, 4, 8]


def run(kernels, k_warps, o: Operands, bias=None, dtype=torch.float32):
    x, x_scales, w, w_scales = o.on(kernels.device)
    (m, k), (n, groups) = x.shape, w_scales.shape
    bias = None if bias is None else bias.to(kernels.device, dtype)
    out = torch.empty(m, n, dtype=dtype, device=kernels.device)
    kernels.module.w8a8_gemv(
        k_warps, DTYPE_NAMES[dtype], ptr(out), ptr(x), ptr(x_scales), ptr(w), ptr(w_scales), ptr(bias), m, n, k, groups,
        stream(x),
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize("k_warps", K_WARPS)
# below, at and above a warp's step of 512 columns and eight warps' 4096; 1040 ends in the middle of a step
@pytest.mark.parametrize("k", [16, 496, 512, 528, 1040, 4112])
def test_w8a8_gemv_sums_exactly(kernels, k, k_warps):
    n = 32 // k_warps + 1  # one more than a block's weight rows
    x, w = codes(8, k, seed=1), codes(n, k, seed=2)
    for m in range(1, 9):
        o = Operands(x[:m], torch.ones(m, 1), w, torch.ones(n, 1))
        assert torch.equal(run(kernels, k_warps, o), integer_product(o.x, w).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (3, 4), (4, 5), (5, 31), (8, 35)])
def test_w8a8_gemv_scales_and_adds_bias(kernels, m, n, groups, dtype):
    o = operands(m, n, 640, groups)
    bias = (scales(n, seed=9) * 1000).to(dtype)
    got = run(kernels, 2, o, bias, dtype)
    assert relative_error(got, product(o, bias)) < arithmetic_limit("w8a8_gemm", dtype)


@pytest.mark.parametrize("k_warps", K_WARPS)
@pytest.mark.parametrize("k", [128, 512, 640, 4224])
def test_w8a8_gemv_adds_groups_of_any_row_length(kernels, k, k_warps):
    o = operands(3, 9, k, k // 128)
    assert relative_error(run(kernels, k_warps, o), product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("groups", [1, 9])
def test_w8a8_gemv_gives_a_row_the_same_bits_in_any_batch(kernels, groups):
    o = operands(8, 20, 1152, groups)
    whole = run(kernels, 2, o)
    for m in range(1, 8):
        part = Operands(o.x[:m], o.x_scales[:m], o.w, o.w_scales)
        assert torch.equal(run(kernels, 2, part), whole[:m])


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("k", [4, 20, 508, 516, 1036])
def test_w8a8_gemv_takes_rows_that_do_not_start_on_16_bytes(kernels, m, k):
    o = operands(m, 6, k, 1)
    for k_warps in (1, 4):
        assert relative_error(run(kernels, k_warps, o), product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("groups", [1, 9])
def test_w8a8_gemv_is_deterministic(kernels, groups):
    o = operands(4, 20, 1152, groups)
    first = run(kernels, 4, o)
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert torch.equal(first, run(kernels, 4, o))


def test_w8a8_gemv_refuses_more_rows_and_other_splits(kernels):
    with pytest.raises(ValueError, match="x has 9 rows, at most 8 are taken; use w8a8_gemm"):
        run(kernels, 1, operands(9, 4, 64, 1))
    with pytest.raises(ValueError, match="k_warps is 3, wanted 1, 2, 4 or 8"):
        run(kernels, 3, operands(2, 4, 64, 1))


def test_k_warps_fill_the_card_without_idle_warps():
    assert linear.k_warps_for(151936, 4096, units=80) == 1
    assert linear.k_warps_for(4096, 4096, units=80) == 2
    assert linear.k_warps_for(1024, 4096, units=80) == 8
    assert linear.k_warps_for(1024, 1024, units=80) == 2  # two steps of 512 columns: no work for a third warp
    assert linear.k_warps_for(64, 512, units=80) == 1
    assert linear.k_warps_for(1024, 4096, units=80, rows=64) == 1
