# SPDX-License-Identifier: BSD-3-Clause
"""fp16_product: what w8a8_gemm gives, by fp16 matrix products."""

from dataclasses import replace

import pytest
import torch

from vllm_superl8.ops import fp16_product, gemm, tuning
from vllm_superl8.ops.registry import OPS

from products import operands, product, scales
from tolerances import Quality, arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def run(kernels, o, bias, dtype):
    x, x_scales, w, w_scales = o.on(kernels.device)
    out = torch.empty(len(x), len(w), dtype=dtype, device=kernels.device)
    bias = None if bias is None else bias.to(kernels.device, dtype)
    fp16_product.fp16_product(kernels.module, x, x_scales, w, w_scales, bias, out)
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 4), (70, 200, 272), (33, 131, 2048)])
def test_fp16_product_matches_float64(kernels, monkeypatch, m, n, k, dtype):
    monkeypatch.setattr(fp16_product, "SCRATCH_BYTES", 1)  # 64 columns at a time
    o, bias = operands(m, n, k, 1), scales(n, seed=9) * 1000
    got = run(kernels, o, bias, dtype)
    assert relative_error(got, product(o, bias.to(dtype))) < arithmetic_limit("w8a8_gemm", dtype)
    assert torch.equal(got, run(kernels, o, bias, dtype))
    monkeypatch.undo()
    assert torch.equal(got, run(kernels, o, bias, dtype))  # columns do not depend on their neighbours


@pytest.mark.parametrize("m", [3, 70])
def test_fp16_product_of_groups_rounds_their_ratios_only(kernels, m):
    o = operands(m, 130, 640, 5)
    quality = Quality.of(run(kernels, o, None, torch.float32), product(o))
    assert quality.sqnr_db > 70, quality  # measured 75


@pytest.mark.parametrize("groups", [1, 2])
def test_fp16_product_keeps_small_and_large_scales(kernels, groups):
    o = operands(9, 64, 256, groups)
    small = replace(o, x_scales=o.x_scales * 1e-9, w_scales=o.w_scales * 1e-9)
    large = replace(o, x_scales=o.x_scales * 1e9, w_scales=o.w_scales * 1e9)
    for changed in (small, large):
        assert Quality.of(run(kernels, changed, None, torch.float32), product(changed)).sqnr_db > 70


@pytest.mark.parametrize("groups", [1, 2])
def test_fp16_product_makes_nan_of_scales_that_are_not_finite(kernels, groups):
    o = operands(5, 8, 256, groups)
    o.x[1], o.x_scales[1, 0] = 0, float("inf")  # as quantize_int8 writes a row with an infinity
    got = run(kernels, o, None, torch.float32)
    assert got[1].isnan().all() and torch.isfinite(got[0]).all() and torch.isfinite(got[2:]).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_w8a8_gemm_takes_it_where_the_card_was_measured_so(kernels, monkeypatch, groups):
    healthy = replace(tuning.SHIPPED, fp16_macs_a_us=1e9)
    taken = []
    monkeypatch.setattr(gemm, "tuning_for", lambda _: healthy)
    monkeypatch.setattr(gemm, "fp16_product", lambda *args: taken.append(1) or fp16_product.fp16_product(*args))
    o = operands(300, 264, 1024, 8 if groups > 1 else 1)
    x, x_scales, w, w_scales = o.on(kernels.device)
    shaped = kernels.run("w8a8_gemm", x.view(3, 100, -1), x_scales.view(3, 100, -1), w, w_scales, None, torch.float32)
    assert taken == [1] and shaped.shape == (3, 100, 264)
    want = OPS["w8a8_gemm"].reference(o.x, o.x_scales, o.w, o.w_scales, None, torch.float32)
    assert Quality.of(shaped.view(300, 264), want).sqnr_db > 70
