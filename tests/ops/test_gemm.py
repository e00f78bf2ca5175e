# SPDX-License-Identifier: BSD-3-Clause
"""w8a8_gemm: every tile against exact integers and float64, and the op as its callers see it."""

import pytest
import torch

from vllm_superl8.ops import linear
from vllm_superl8.ops.gemm import MOST_K
from vllm_superl8.ops.registry import DTYPE_NAMES, OPS, ptr, stream
from vllm_superl8.ops.tuning import SHIPPED

from products import Operands, codes, integer_product, operands, product, scales
from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TILES = [(tile.m, tile.n, grouped) for grouped in (False, True) for tile in SHIPPED.tiles(grouped)]
# around gemv's 8 rows and the tiles' 16, 32, 64 and 128
ROW_COUNTS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130]


def run_tile(kernels, tile, o: Operands, bias=None, dtype=torch.float32):
    """One tile's kernel, whatever the table would choose."""
    x, x_scales, w, w_scales = o.on(kernels.device)
    (m, k), (n, groups) = x.shape, w_scales.shape
    bias = None if bias is None else bias.to(kernels.device, dtype)
    out = torch.empty(m, n, dtype=dtype, device=kernels.device)
    kernels.module.w8a8_gemm(
        tile, DTYPE_NAMES[dtype], ptr(out), ptr(x), ptr(x_scales), ptr(w), ptr(w_scales), ptr(bias), m, n, k, groups,
        stream(x),
    )  # fmt: skip
    return out.cpu()


def run(kernels, o: Operands, bias=None, dtype=torch.float32):
    """The op."""
    bias = None if bias is None else bias.to(kernels.device)
    return kernels.run("w8a8_gemm", *o.on(kernels.device), bias, dtype).cpu()


@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
@pytest.mark.parametrize(("dm", "dn"), [(-1, -1), (0, 0), (1, 1), (-3, 2)])
def test_w8a8_gemm_tiles_sum_exactly_around_their_edges(kernels, tile_m, tile_n, grouped, dm, dn):
    # 640: five groups, which four slices do not divide; 272: a last step with 16 of its 128 columns
    k = 640 if grouped else 272
    groups = k // 128 if grouped else 1
    m, n = tile_m + dm, tile_n + dn
    ones = Operands(codes(m, k, seed=1), torch.ones(m, groups), codes(n, k, seed=2), torch.ones(n, groups))
    got = run_tile(kernels, f"{tile_m}x{tile_n}", ones)
    assert torch.equal(got.long(), integer_product(ones.x, ones.w))


@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
def test_w8a8_gemm_tiles_cover_many_tiles_in_bands(kernels, tile_m, tile_n, grouped):
    m, n, k = min(9 * tile_m + 1, 600), 2 * tile_n + 4, 128  # more than one band of eight tile rows for small tiles
    o = operands(m, n, 2 * k, 2) if grouped else operands(m, n, k, 1)
    got = run_tile(kernels, f"{tile_m}x{tile_n}", o)
    assert relative_error(got, product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile_m", "tile_n", "grouped"), TILES)
def test_w8a8_gemm_tiles_scale_and_add_bias(kernels, tile_m, tile_n, grouped, dtype):
    m, n, k = tile_m // 2 + 3, tile_n + 20, 384
    o = operands(m, n, k, 3 if grouped else 1)
    bias = (scales(n, seed=9) * 1000).to(dtype)
    got = run_tile(kernels, f"{tile_m}x{tile_n}", o, bias, dtype)
    assert got.dtype == dtype
    assert relative_error(got, product(o, bias)) < arithmetic_limit("w8a8_gemm", dtype)


@pytest.mark.parametrize("k", [16, 32, 48, 112, 128, 144, 400])
def test_w8a8_gemm_takes_any_number_of_16_byte_chunks(kernels, k):
    o = operands(17, 19, k, 1)
    for tile in SHIPPED.per_row:
        assert relative_error(run_tile(kernels, tile.name, o), product(o)) < arithmetic_limit(
            "w8a8_gemm", torch.float32
        )


@pytest.mark.parametrize("m", ROW_COUNTS)
@pytest.mark.parametrize(("k", "groups"), [(80, 1), (256, 2)])
def test_w8a8_gemm_matches_float64_for_any_number_of_rows(kernels, m, k, groups):
    o = operands(m, 37, k, groups)
    got = run(kernels, o)
    assert got.shape == (m, 37)
    assert relative_error(got, product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("m", [3, 21])
@pytest.mark.parametrize("k", [4, 12, 20, 36, 132, 260])
def test_w8a8_gemm_takes_rows_that_do_not_start_on_16_bytes(kernels, m, k):
    o = operands(m, 33, k, 1)
    assert relative_error(run(kernels, o), product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("m", [3, 21])
def test_w8a8_gemm_takes_operands_that_start_anywhere_on_4_bytes(kernels, m):
    o = operands(m, 9, 64, 1)
    x, x_scales, w, w_scales = o.on(kernels.device)
    shifted = torch.empty(4 + w.numel(), dtype=torch.int8, device=kernels.device)[4:].view_as(w).copy_(w)
    assert ptr(shifted) % 16
    got = kernels.run("w8a8_gemm", x, x_scales, shifted, w_scales, None, torch.float32).cpu()
    assert relative_error(got, product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("m", [1, 9])
def test_w8a8_gemm_sums_the_longest_rows_without_overflow(kernels, m):
    x, w = torch.full((m, MOST_K), -128, dtype=torch.int8), torch.full((2, MOST_K), -128, dtype=torch.int8)
    w[1] = 127
    o = Operands(x, torch.ones(m, 1), w, torch.ones(2, 1))
    assert torch.equal(run(kernels, o), integer_product(x, w).float())


@pytest.mark.parametrize("m", [2, 40])
def test_w8a8_gemm_sums_groups_of_the_largest_codes_exactly(kernels, m):
    x, w = torch.full((m, 512), -128, dtype=torch.int8), torch.full((5, 512), -128, dtype=torch.int8)
    w[1::2] = 127
    o = Operands(x, torch.ones(m, 4), w, torch.ones(5, 4))
    assert torch.equal(run(kernels, o), integer_product(x, w).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_w8a8_gemm_gives_a_row_the_same_bits_in_any_batch(kernels, dtype):
    o = operands(70, 40, 272, 1)
    bias = scales(40, seed=9)
    whole = run(kernels, o, bias, dtype)
    for m in (1, 2, 3, 8, 9, 16, 33, 65):
        part = Operands(o.x[:m], o.x_scales[:m], o.w, o.w_scales)
        assert torch.equal(run(kernels, part, bias, dtype), whole[:m])


@pytest.mark.parametrize("m", [5, 12, 70])
@pytest.mark.parametrize("groups", [1, 3])
def test_w8a8_gemm_is_deterministic(kernels, m, groups):
    o = operands(m, 70, 384, groups)
    first = run(kernels, o)
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert torch.equal(first, run(kernels, o))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("m", [2, 20])
def test_w8a8_gemm_makes_nan_of_scales_that_are_not_finite(kernels, m, groups):
    o = operands(m, 8, 256, groups)
    o.x[1], o.x_scales[1, 0] = 0, float("inf")  # as quantize_int8 writes a row with an infinity
    got = run(kernels, o)
    assert got[1].isnan().all() and torch.isfinite(got[0]).all()


def test_w8a8_gemm_takes_more_dimensions_and_strided_rows(kernels):
    o = operands(12, 10, 256, 1)
    x, x_scales, w, w_scales = o.on(kernels.device)
    wide = torch.cat([x, x], -1).view(3, 4, 512)[..., :256]
    got = kernels.run("w8a8_gemm", wide, x_scales.view(3, 4, 1), w, w_scales, None, torch.float32)
    assert got.shape == (3, 4, 10)
    assert relative_error(got.view(12, 10), product(o)) < arithmetic_limit("w8a8_gemm", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
def test_w8a8_gemm_reference_matches_float64(groups, dtype):
    o = operands(9, 20, 2560 if groups == 1 else 256, groups)
    bias = scales(20, seed=9)
    got = OPS["w8a8_gemm"].reference(o.x, o.x_scales, o.w, o.w_scales, bias, dtype)
    assert got.dtype == dtype
    assert relative_error(got, product(o, bias)) < arithmetic_limit("w8a8_gemm", dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 130, dtype=torch.int8)}, ValueError, "x has rows of 130 and weight of 128"),
        ({"x": torch.ones(2, 128)}, TypeError, r"x is torch\.float32 and weight torch\.int8, wanted int8"),
        ({"x_scales": torch.ones(2, 1).half()}, TypeError, r"scales are torch\.float16"),
        ({"x_scales": torch.ones(2, 2)}, ValueError, "2 scales a row of x and 1 a row of weight for k of 128"),
        ({"x_scales": torch.ones(3, 1)}, ValueError, r"x \(2, 128\) has scales \(3, 1\)"),
        ({"w": torch.ones(128, 4, dtype=torch.int8).T}, ValueError, "weight or its scales are not contiguous"),
        ({"dtype": torch.int32}, TypeError, r"out_dtype is torch\.int32"),
    ],
)
def test_w8a8_gemm_refuses_what_does_not_fit(kernels, change, error, message):
    o = operands(2, 4, 128, 1)
    given = {"x": o.x, "x_scales": o.x_scales, "w": o.w, "w_scales": o.w_scales, "bias": None, "dtype": torch.float32}
    with pytest.raises(error, match=message):
        kernels.run("w8a8_gemm", *(given | change).values())


@pytest.mark.parametrize("k", [6, 2, MOST_K + 4])
def test_w8a8_gemm_refuses_rows_of_other_lengths(kernels, k):
    o = Operands(torch.ones(1, k).char(), torch.ones(1, 1), torch.ones(1, k).char(), torch.ones(1, 1))
    with pytest.raises(ValueError, match=f"k is {k}, wanted a multiple of 4 from 4 to {MOST_K}"):
        run(kernels, o)


@pytest.mark.parametrize(
    ("m", "n", "k", "grouped", "tile"),
    [
        (2048, 14336, 4096, False, "128x128"),
        (1024, 4096, 4096, False, "128x128"),
        (512, 4096, 14336, False, "64x64"),
        (256, 4096, 4096, False, "64x64"),
        (128, 4096, 4096, False, "64x64"),
        (64, 14336, 4096, False, "32x32"),
        (32, 14336, 4096, False, "32x32"),
        (16, 14336, 4096, False, "16x64"),
        (2048, 14336, 4096, True, "128x128"),
        (128, 4096, 4096, True, "64x64"),
        (32, 14336, 4096, True, "32x64"),
    ],
)
def test_tiles_are_those_that_were_fastest_on_an_h200(m, n, k, grouped, tile):
    assert linear.plan_for(m, n, k, grouped, units=132) == linear.Plan(tile)


@pytest.mark.parametrize("units", [68, 80, 132])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_of_few_tiles_are_split(units, grouped):
    for m in (9, 16):
        plan = linear.plan_for(m, 1024, 4096, grouped, units)
        assert plan.k_split is not None and plan.k_split % (512 if grouped else 128) == 0
        assert linear.plan_for(m, 1024, 4096, grouped, units, may_split=False).k_split is None
        assert linear.plan_for(m, 1024, 512, grouped, units).k_split is None
    assert linear.plan_for(4096, 14336, 4096, grouped, units).k_split is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 16])
def test_w8a8_gemm_takes_its_plan(kernels, groups, dtype):
    """n = 260 and k = 2048 on a V100's multiprocessors: split."""
    o, bias = operands(20, 260, 2048, groups), scales(260, seed=9)
    assert linear.plan_for(20, 260, 2048, groups > 1, 80).k_split is not None
    got = run(kernels, o, bias, dtype)
    assert got.dtype == dtype
    assert relative_error(got, product(o, bias.to(dtype))) < arithmetic_limit("w8a8_gemm", dtype)


def test_w8a8_gemm_refuses_an_unknown_tile(kernels):
    with pytest.raises(ValueError, match="there is no kernel gemm_48x48"):
        run_tile(kernels, "48x48", operands(2, 4, 128, 1))
