# SPDX-License-Identifier: BSD-3-Clause
"""w8a8_gemm_split: several blocks a tile give what one gives."""

import math

import pytest
import torch

from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, stream
from vllm_superl8.ops.tuning import SHIPPED

from products import Operands, codes, integer_product, operands, product, scales
from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TILES = [(tile.m, tile.n, grouped) for grouped in (False, True) for tile in SHIPPED.tiles(grouped) if tile.may_split]


def run_split(kernels, tile, o: Operands, k_split, bias=None, dtype=torch.float32):
    x, x_scales, w, w_scales = o.on(kernels.device)
    (m, k), (n, groups) = x.shape, w_scales.shape
    bias = None if bias is None else bias.to(kernels.device, dtype)
    out = torch.empty(m, n, dtype=dtype, device=kernels.device)
    partial = torch.empty(math.ceil(k / k_split), m, n, dtype=torch.int32, device=kernels.device)
    kernels.module.w8a8_gemm_split(
        tile, DTYPE_NAMES[dtype], ptr(out), ptr(x), ptr(x_scales), ptr(w), ptr(w_scales), ptr(bias), m, n, k, groups,
        ptr(partial), k_split, stream(x),
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
@pytest.mark.parametrize(("dm", "dn"), [(-1, -1), (0, 0), (1, 4)])
@pytest.mark.parametrize("parts", [2, 3])
def test_split_tiles_sum_exactly_around_their_edges(kernels, tile_m, tile_n, grouped, dm, dn, parts):
    step = 512 if grouped else 128
    k = (parts - 1) * step + (128 if grouped else 16)  # the last part is one group, or sixteen columns
    groups = k // 128 if grouped else 1
    m, n = tile_m + dm, tile_n + dn
    ones = Operands(codes(m, k, seed=1), torch.ones(m, groups), codes(n, k, seed=2), torch.ones(n, groups))
    got = run_split(kernels, f"{tile_m}x{tile_n}", ones, step)
    assert torch.equal(got.long(), integer_product(ones.x, ones.w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
def test_split_tiles_scale_and_add_bias(kernels, tile_m, tile_n, grouped, dtype):
    m, n, k = tile_m // 2 + 3, 2 * tile_n + 3, 1280
    o = operands(m, n, k, 10 if grouped else 1)
    bias = (scales(n, seed=9) * 1000).to(dtype)
    tile = f"{tile_m}x{tile_n}"
    got = run_split(kernels, tile, o, 512, bias, dtype)
    assert relative_error(got, product(o, bias)) < arithmetic_limit("w8a8_gemm", dtype)
    if not grouped:
        few = Operands(o.x[:8], o.x_scales[:8], o.w, o.w_scales)  # streamed: the sums are integers whatever the kernel
        assert torch.equal(
            got[:8], kernels.run("w8a8_gemm", *few.on(kernels.device), bias.to(kernels.device), dtype).cpu()
        )


@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
def test_split_tiles_are_deterministic(kernels, tile_m, tile_n, grouped):
    o = operands(tile_m + 5, tile_n + 8, 1152, 9 if grouped else 1)
    first = run_split(kernels, f"{tile_m}x{tile_n}", o, 512)
    for _ in range(2):  # the emulator resumes threads in another order each time
        assert torch.equal(first, run_split(kernels, f"{tile_m}x{tile_n}", o, 512))


@pytest.mark.parametrize("groups", [1, 8])
def test_split_tiles_make_nan_of_scales_that_are_not_finite(kernels, groups):
    o = operands(20, 64, 1024, groups)
    o.x[1], o.x_scales[1, 0] = 0, float("inf")  # as quantize_int8 writes a row with an infinity
    got = run_split(kernels, "32x64" if groups > 1 else "32x32", o, 512)
    assert got[1].isnan().all() and torch.isfinite(got[0]).all() and torch.isfinite(got[2:]).all()


def test_split_tiles_sum_the_longest_rows_without_overflow(kernels):
    k = 131056
    o = Operands(torch.full((9, k), -128).char(), torch.ones(9, 1), torch.full((4, k), -128).char(), torch.ones(4, 1))
    o.w[1] = 127
    assert torch.equal(run_split(kernels, "16x64", o, 65536), integer_product(o.x, o.w).float())


def test_split_tiles_refuse_what_does_not_fit(kernels):
    o = operands(2, 4, 512, 1)
    with pytest.raises(ValueError, match="k_split is 100, wanted a multiple of 128"):
        run_split(kernels, "32x32", o, 100)
    with pytest.raises(ValueError, match="k_split is 128, wanted a multiple of 512"):
        run_split(kernels, "32x64", operands(2, 4, 512, 4), 128)
    with pytest.raises(ValueError, match="there is no kernel gemm_split_128x128"):
        run_split(kernels, "128x128", o, 128)
    with pytest.raises(ValueError, match="k of 500, or a pointer, is no multiple of 16 bytes"):
        run_split(kernels, "32x32", operands(2, 4, 500, 1), 128)
    assert run_split(kernels, "32x32", operands(0, 4, 512, 1), 128).shape == (0, 4)
