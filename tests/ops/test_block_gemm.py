# SPDX-License-Identifier: BSD-3-Clause
"""block_gemm: both kernels on every format against gguf.quants in float64, and the op as its callers see it."""

import pytest
import torch
from blocks import FORMATS, Weights, weights

from vllm_superl8.formats import blocks
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.formats.layout import LAYOUTS
from vllm_superl8.ops import linear
from vllm_superl8.ops.registry import DTYPE_NAMES, OPS, ptr, stream

from products import codes, scales
from tolerances import Quality, arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
K_WARPS = [1, 2, 4, 8]


def activations(m, k, seed=50):
    return codes(m, k, seed=seed), scales(m, k // UNIT, seed=seed + 1)


def product(x, x_scales, w: Weights, bias=None):
    """In float64."""
    values = (x.double().unflatten(1, (-1, UNIT)) * x_scales.double().unsqueeze(-1)).flatten(1)
    out = values @ w.values.T
    return out if bias is None else out + bias.double()


def arguments(kernels, x, x_scales, w, bias, dtype, out):
    """What both launchers take after the choice of the kernel, and the tensors behind its addresses."""
    x, x_scales, planes = x.to(kernels.device), x_scales.to(kernels.device), w.on(kernels.device)
    group_size = x.shape[1] // planes[1].shape[1] if w.format.startswith("int") else 32
    codebook = blocks.codebook(LAYOUTS[w.format], kernels.device)
    return (
        DTYPE_NAMES[dtype], ptr(out), ptr(x), ptr(x_scales), w.format, [ptr(plane) for plane in planes], ptr(codebook),
        group_size, planes[1].dtype == torch.float32, ptr(bias), *out.shape, x.shape[1], stream(x),
    ), (x, x_scales, planes)  # fmt: skip


def run(kernels, launcher, choice, x, x_scales, w, bias=None, dtype=torch.float32):
    bias = None if bias is None else bias.to(kernels.device, dtype)
    out = torch.empty(x.shape[0], w.values.shape[0], dtype=dtype, device=kernels.device)
    given, _alive = arguments(kernels, x, x_scales, w, bias, dtype, out)
    getattr(kernels.module, launcher)(choice, *given)
    return out.cpu()


def close(got, want, dtype=torch.float32):
    return relative_error(got, want) < arithmetic_limit("block_gemm", dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_block_gemv_takes_one_to_eight_rows(kernels, format):
    k = max(160, LAYOUTS[format].values)
    w = weights(format, 33, k)
    for m in range(1, 9):
        x = activations(m, k, seed=m)
        assert close(run(kernels, "block_gemv", 2, *x, w), product(*x, w)), m


@pytest.mark.parametrize("format", FORMATS)
def test_block_gemv_covers_long_rows(kernels, format):
    k = 1024 + LAYOUTS[format].values  # a unit, or block, more than a warp's step
    w = weights(format, 17, k)
    x = activations(2, k)
    for k_warps in K_WARPS:
        assert close(run(kernels, "block_gemv", k_warps, *x, w), product(*x, w)), k_warps


@pytest.mark.parametrize("tile", [tile.name for tile in linear.BLOCK_TILES])
@pytest.mark.parametrize("format", FORMATS)
def test_block_gemm_tiles_match_float64(kernels, format, tile):
    rows, columns = map(int, tile.split("x"))
    values = LAYOUTS[format].values
    # one block; several steps with a ragged last one; several tiles with overhang on both sides
    for m, n, k in ((rows - 1, 19, values), (9, columns + 1, 256 if values == 256 else 416), (rows + 1, 21, 512)):
        w, x = weights(format, n, k, seed=k), activations(m, k)
        assert close(run(kernels, "block_gemm", tile, *x, w), product(*x, w)), (m, n, k)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 8, 9, 31, 33, 63, 64, 65, 127, 130])
def test_block_gemm_takes_any_number_of_rows(kernels, m):
    for format in ("q4_1", "q6_k"):
        w, x = weights(format, 37, 256), activations(m, 256)
        got = kernels.run("block_gemm", *(t.to(kernels.device) for t in x), w.on(kernels.device), format, None,
                          torch.float32)  # fmt: skip
        assert got.shape == (m, 37)
        assert close(got, product(*x, w)), format


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("format", ["q4_k", "int4"])
def test_block_gemm_adds_bias_and_rounds_once(kernels, format, m, dtype):
    w, x = weights(format, 20, 512), activations(m, 512)
    bias = (scales(20, seed=9) * 1000).to(dtype)
    got = kernels.run("block_gemm", *(t.to(kernels.device) for t in x), w.on(kernels.device), format,
                      bias.to(kernels.device), dtype)  # fmt: skip
    assert got.dtype == dtype
    assert close(got, product(*x, w, bias), dtype)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("format", ["int3", "int4", "int4_zero"])
def test_block_gemm_takes_groups_and_both_kinds_of_scales(kernels, format, group_size, scale_dtype):
    k = 3 * 128
    w = weights(format, 23, k, group_size=group_size, scale_dtype=scale_dtype)
    for m in (2, 10):
        x = activations(m, k)
        got = kernels.run("block_gemm", *(t.to(kernels.device) for t in x), w.on(kernels.device), format, None,
                          torch.float32)  # fmt: skip
        assert close(got, product(*x, w)), m


@pytest.mark.parametrize("m", [2, 34])
def test_block_gemm_gives_a_row_the_same_bits_in_any_batch(kernels, m):
    w, (x, x_scales) = weights("q4_k", 10, 768), activations(m, 768)
    launcher, choice = ("block_gemv", 1) if m <= 8 else ("block_gemm", "32x64")
    whole = run(kernels, launcher, choice, x, x_scales, w)
    assert torch.equal(run(kernels, launcher, choice, x, x_scales, w), whole)
    assert torch.equal(run(kernels, launcher, choice, x[1:2], x_scales[1:2], w), whole[1:2])


@pytest.mark.parametrize("format", FORMATS)
def test_block_gemm_reference_matches_float64(format):
    w, (x, x_scales) = weights(format, 70, 512), activations(6, 512)
    got = OPS["block_gemm"].reference(x.view(2, 3, -1), x_scales.view(2, 3, -1), w.planes, format, None, torch.float32)
    assert close(got.flatten(0, 1), product(x, x_scales, w))


@pytest.mark.parametrize("format", FORMATS)
def test_block_gemm_is_near_the_product_of_unrounded_activations(format):
    w = weights(format, 64, 512)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)) + 0.3
    x[:, ::64] *= 20
    x_codes, x_scales = OPS["quantize_int8"].reference(x, UNIT)
    got = OPS["block_gemm"].reference(x_codes, x_scales, w.planes, format, None, torch.float32)
    assert Quality.of(got, x.double() @ w.values.T).sqnr_db > 30


@pytest.mark.parametrize("m", [2, 12])
def test_block_gemm_shows_activations_that_are_not_finite(kernels, m):
    w, (x, x_scales) = weights("q4_1", 16, 320), activations(m, 320)
    x_scales[1, 9] = float("nan")
    launcher, choice = ("block_gemv", 1) if m <= 8 else ("block_gemm", "32x64")
    got = run(kernels, launcher, choice, x, x_scales, w)
    assert got[1].isnan().all() and torch.isfinite(got[0]).all() and torch.isfinite(got[2:]).all()


def test_block_gemm_takes_no_rows(kernels):
    w = weights("q8_0", 5, 64)
    x = torch.empty(0, 64, dtype=torch.int8, device=kernels.device)
    got = kernels.run("block_gemm", x, torch.empty(0, 2, device=kernels.device), w.on(kernels.device), "q8_0", None,
                      torch.float16)  # fmt: skip
    assert got.shape == (0, 5)


def test_block_gemm_refuses_what_it_cannot_multiply(kernels):
    w, (x, x_scales) = weights("q4_k", 4, 512), activations(2, 512)
    with pytest.raises(TypeError, match=r"x is torch\.float32 with torch\.float32 scales, wanted int8"):
        kernels.run("block_gemm", x.float(), x_scales, w.planes, "q4_k", None, torch.float16)
    with pytest.raises(TypeError, match=r"out_dtype is torch\.float64"):
        kernels.run("block_gemm", x, x_scales, w.planes, "q4_k", None, torch.float64)
    with pytest.raises(ValueError, match=r"scales \(2, 4\), wanted one for every 32 columns"):
        kernels.run("block_gemm", x, x_scales[:, :4], w.planes, "q4_k", None, torch.float16)
    with pytest.raises(ValueError, match="weights of format 'q9_k': wanted one of int4"):
        kernels.run("block_gemm", x, x_scales, w.planes, "q9_k", None, torch.float16)
    with pytest.raises(ValueError, match="q6_k: planes are"):
        kernels.run("block_gemm", x, x_scales, w.planes, "q6_k", None, torch.float16)
    with pytest.raises(ValueError, match="planes of format q4_k are not contiguous"):
        kernels.run("block_gemm", x, x_scales, [plane[::2] for plane in w.planes], "q4_k", None, torch.float16)
    x = activations(9, 512)
    with pytest.raises(ValueError, match="block_gemv: x has 9 rows, at most 8 are taken; use block_gemm"):
        run(kernels, "block_gemv", 1, *x, w)
    with pytest.raises(ValueError, match="block_gemv: k_warps is 3"):
        run(kernels, "block_gemv", 3, *activations(2, 512), w)
    with pytest.raises(ValueError, match="there is no tile 8x8"):
        run(kernels, "block_gemm", "8x8", *x, w)


def test_block_gemm_fake_has_the_shape_of_the_result():
    w, (x, x_scales) = weights("q5_0", 7, 64), activations(4, 64)
    given = (x.view(2, 2, -1), x_scales.view(2, 2, -1), w.planes, "q5_0", None, torch.bfloat16)
    real, fake = OPS["block_gemm"].reference(*given), OPS["block_gemm"].fake(*given)
    assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
