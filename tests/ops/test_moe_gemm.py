# SPDX-License-Identifier: BSD-3-Clause
"""w8a8_moe_gemm and moe_sum."""

import pytest
import torch

from vllm_superl8.ops import linear, moe_gemm
from vllm_superl8.ops.registry import OPS, ptr, stream

from products import Operands, codes, product, scales
from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TILES = [("32x32", 32, 1), ("64x64", 64, 1), ("32x64", 32, 2), ("64x64", 64, 2)]  # name, rows, groups


def experts(num_experts, n, k, groups):
    return codes(num_experts, n, k, seed=2), scales(num_experts, n, groups, seed=3)


def routed_product(x, x_scales, w, w_scales, ids, x_repeat):
    """Row by row in float64; rows without an expert are zeros."""
    out = torch.zeros(len(ids), w.shape[1], dtype=torch.float64)
    for row, expert in enumerate(ids.tolist()):
        if 0 <= expert < len(w):
            source = row // x_repeat
            own = Operands(x[source, None], x_scales[source, None], w[expert], w_scales[expert])
            out[row] = product(own)
    return out


def assert_routed(got, want, ids, num_experts, dtype):
    has_expert = (ids >= 0) & (ids < num_experts)
    got = got.cpu()
    assert got.dtype == dtype
    assert (got[~has_expert] == 0).all()
    assert relative_error(got[has_expert], want[has_expert]) < arithmetic_limit("w8a8_gemm", dtype)


def run(kernels, x, x_scales, w, w_scales, ids, x_repeat, dtype=torch.float32):
    """The op."""
    tensors = (t.to(kernels.device) for t in (x, x_scales, w, w_scales, ids))
    return kernels.run("w8a8_moe_gemm", *tensors, x_repeat, dtype)


def run_tile(kernels, tile, tile_m, x, x_scales, w, w_scales, ids, x_repeat, tiles=None):
    """The kernels that sort rows into tiles, whatever the table would choose."""
    x, x_scales, w, w_scales, ids = (t.to(kernels.device) for t in (x, x_scales, w, w_scales, ids))
    (num_experts, n, k), groups, rows = w.shape, w_scales.shape[2], len(ids)
    tiles = rows // tile_m + min(rows, num_experts + 1) if tiles is None else tiles
    out = torch.empty(rows, n, device=kernels.device)
    tile_rows = torch.empty(tiles * tile_m, dtype=torch.int32, device=kernels.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=kernels.device)
    kernels.module.w8a8_moe_gemm(
        tile, "fp32", ptr(out), ptr(x), ptr(x_scales), ptr(w), ptr(w_scales), ptr(ids), rows, n, k, groups, num_experts,
        x_repeat, ptr(tile_rows), ptr(tile_expert), tiles, stream(x),
    )  # fmt: skip
    return out


def ids_of(*counts):
    """Routing with counts[e] rows of expert e, in a random order; int32."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (1, 8), (3, 2), (20, 4)])
def test_w8a8_moe_gemm_matches_float64(kernels, tokens, topk, groups, dtype):
    k, n, num_experts = 256, 37, 9
    x, x_scales = codes(tokens, k, seed=0), scales(tokens, groups, seed=1)
    w, w_scales = experts(num_experts, n, k, groups)
    ids = torch.randint(0, num_experts, (tokens * topk,), generator=torch.Generator().manual_seed(5)).int()
    got = run(kernels, x, x_scales, w, w_scales, ids, topk, dtype)
    want = routed_product(x, x_scales, w, w_scales, ids, topk)
    assert_routed(got, want, ids, num_experts, dtype)


@pytest.mark.parametrize("rows", [6, 60])  # streamed, and sorted into tiles
def test_w8a8_moe_gemm_gives_zeros_for_ids_without_an_expert(kernels, rows):
    k, num_experts = 64, 4
    x, x_scales = codes(rows, k, seed=0), scales(rows, 1, seed=1)
    w, w_scales = experts(num_experts, 21, k, 1)
    ids = torch.tensor([-1, 0, 3, 4, 2**31 - 1, -(2**31)] * (rows // 6), dtype=torch.int32)
    for dtype in DTYPES:
        got = run(kernels, x, x_scales, w, w_scales, ids, 1, dtype)
        assert_routed(got, routed_product(x, x_scales, w, w_scales, ids, 1), ids, num_experts, dtype)


@pytest.mark.parametrize(("tile", "tile_m", "groups"), TILES)
@pytest.mark.parametrize(
    "counts",
    [(0, 0, 0, 1), (0, 70, 0, 0), (1, 31, 32, 33), (64, 0, 65, 2), (3, 0, 40, 0, 30)],
    ids=["one row", "all on one expert", "around 32", "around 64", "with ids beyond the experts"],
)
def test_w8a8_moe_gemm_tiles_any_routing(kernels, counts, tile, tile_m, groups):
    k, n, num_experts = 128 * groups, 68, 4
    ids = ids_of(*counts)
    x, x_scales = codes(len(ids), k, seed=0), scales(len(ids), groups, seed=1)
    w, w_scales = experts(num_experts, n, k, groups)
    got = run_tile(kernels, tile, tile_m, x, x_scales, w, w_scales, ids, 1)
    assert_routed(got, routed_product(x, x_scales, w, w_scales, ids, 1), ids, num_experts, torch.float32)


@pytest.mark.parametrize("num_experts", [31, 32, 130])
def test_w8a8_moe_gemm_schedules_any_number_of_experts(kernels, num_experts):
    topk, k, n = 2, 32, 4
    ids = torch.arange(2 * num_experts, dtype=torch.int32).flip(0) % (num_experts + 1) - 1
    tokens = len(ids) // topk
    x, x_scales = codes(tokens, k, seed=0), scales(tokens, 1, seed=1)
    w, w_scales = experts(num_experts, n, k, 1)
    got = run_tile(kernels, "32x32", 32, x, x_scales, w, w_scales, ids, topk)
    assert_routed(got, routed_product(x, x_scales, w, w_scales, ids, topk), ids, num_experts, torch.float32)


def test_w8a8_moe_gemm_schedules_more_rows_than_threads(kernels):
    num_experts, k, n = 2, 16, 4
    ids = torch.randint(-1, 3, (2100,), generator=torch.Generator().manual_seed(5)).int()
    x, x_scales = codes(2100, k, seed=0), scales(2100, 1, seed=1)
    w, w_scales = experts(num_experts, n, k, 1)
    got = run(kernels, x, x_scales, w, w_scales, ids, 1)
    assert_routed(got, routed_product(x, x_scales, w, w_scales, ids, 1), ids, num_experts, torch.float32)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("k", [4, 20, 524])
def test_w8a8_moe_gemm_takes_rows_that_do_not_start_on_16_bytes(kernels, k, rows):
    ids = torch.arange(rows, dtype=torch.int32) % 3
    x, x_scales = codes(rows, k, seed=0), scales(rows, 1, seed=1)
    w, w_scales = experts(3, 10, k, 1)
    got = run(kernels, x, x_scales, w, w_scales, ids, 1)
    assert_routed(got, routed_product(x, x_scales, w, w_scales, ids, 1), ids, 3, torch.float32)


@pytest.mark.parametrize("groups", [1, 2])
def test_w8a8_moe_gemm_is_deterministic_and_a_row_the_same_in_any_batch(kernels, groups):
    x, x_scales = codes(60, 256, seed=0), scales(60, groups, seed=1)
    w, w_scales = experts(3, 20, 256, groups)
    ids = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(5)).int()
    first = run(kernels, x, x_scales, w, w_scales, ids, 1)
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert torch.equal(first, run(kernels, x, x_scales, w, w_scales, ids, 1))
    few = run(kernels, x[:2], x_scales[:2], w, w_scales, ids[:2], 1)  # streamed rather than tiled
    if groups == 1:
        assert torch.equal(few, first[:2])
    assert relative_error(few, first[:2]) < arithmetic_limit("w8a8_gemm", torch.float32)


def test_w8a8_moe_gemm_takes_no_rows(kernels):
    w, w_scales = experts(3, 20, 64, 1)
    got = run(kernels, codes(0, 64, seed=0), scales(0, 1, seed=1), w, w_scales, torch.empty(0, dtype=torch.int32), 2)
    assert got.shape == (0, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 64])
def test_w8a8_moe_gemm_replays_in_a_graph_with_other_routing(tokens):
    x, x_scales = codes(tokens, 256, seed=0).cuda(), scales(tokens, 1, seed=1).cuda()
    w, w_scales = (t.cuda() for t in experts(8, 128, 256, 1))
    generator = torch.Generator().manual_seed(5)
    routings = [torch.randint(-1, 8, (tokens * 2,), generator=generator).int() for _ in range(3)]
    ids = routings[0].cuda()
    moe_gemm.w8a8_moe_gemm(x, x_scales, w, w_scales, ids, 2, torch.float32)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_gemm.w8a8_moe_gemm(x, x_scales, w, w_scales, ids, 2, torch.float32)
    for routing in routings:
        ids.copy_(routing)
        graph.replay()
        want = routed_product(x.cpu(), x_scales.cpu(), w.cpu(), w_scales.cpu(), routing, 2)
        assert_routed(out, want, routing, 8, torch.float32)


def test_w8a8_moe_gemm_refuses_what_does_not_fit(kernels):
    x, x_scales = codes(4, 64, seed=0), scales(4, 1, seed=1)
    w, w_scales = experts(3, 20, 64, 1)
    ids = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="4 expert ids for 4 rows of x and x_repeat 2, wanted their product"):
        run(kernels, x, x_scales, w, w_scales, ids, 2)
    with pytest.raises(TypeError, match=r"expert_ids are torch\.int64, wanted int32"):
        run(kernels, x, x_scales, w, w_scales, ids.long(), 1)
    with pytest.raises(ValueError, match="weight or its scales are not contiguous"):
        run(kernels, x, x_scales, w.transpose(0, 1).contiguous().transpose(0, 1), w_scales, ids, 1)
    with pytest.raises(ValueError, match="got 1 tiles, wanted 4 or more"):
        run_tile(kernels, "32x32", 32, x, x_scales, w, w_scales, ids, 1, tiles=1)


def test_moe_tiles_are_chosen_by_the_rows_of_an_expert():
    assert linear.moe_tile_for(16, 128, False) is None
    assert linear.moe_tile_for(256, 128, False).name == "32x32"
    assert linear.moe_tile_for(256, 128, True).name == "32x64"
    assert linear.moe_tile_for(16384, 128, False).name == "64x64"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "topk", "n"), [(1, 1, 1), (3, 8, 7), (2, 2, 8), (5, 3, 264), (1, 5, 2056)])
def test_moe_sum_matches_reference(kernels, tokens, topk, n, dtype):
    generator = torch.Generator().manual_seed(0)
    y = (torch.randn(tokens, topk, n, generator=generator) + 0.5).to(kernels.device, dtype)
    weights = torch.rand(tokens, topk, generator=generator).to(kernels.device)
    got = kernels.run("moe_sum", y, weights)
    assert torch.equal(got, OPS["moe_sum"].reference(y, weights))
    want = (y.double() * weights.double().unsqueeze(-1)).sum(1)
    assert relative_error(got, want) < arithmetic_limit("moe_sum", dtype)


def test_moe_sum_takes_strided_values_and_no_tokens(kernels):
    y = torch.randn(4, 2, 48, device=kernels.device)
    weights = torch.rand(2, 4, device=kernels.device)
    got = kernels.run("moe_sum", y.transpose(0, 1), weights)
    assert torch.equal(got, OPS["moe_sum"].reference(y.transpose(0, 1), weights))
    assert kernels.run("moe_sum", y.transpose(0, 1)[:0], weights[:0]).shape == (0, 48)


def test_moe_sum_refuses_what_does_not_fit(kernels):
    with pytest.raises(ValueError, match=r"y \(2, 3, 8\) with topk_weights \(2, 2\)"):
        kernels.run("moe_sum", torch.ones(2, 3, 8, device=kernels.device), torch.ones(2, 2, device=kernels.device))
