# SPDX-License-Identifier: BSD-3-Clause
"""Routed experts at the sizes of Qwen3-30B-A3B: 128 experts, top-8, both products of a layer.

share_dp4a counts the tokens' own work; share_hbm the weights of the experts that have tokens, and the activations.
"""

from collections.abc import Iterator

import torch

from vllm_superl8.ops import quantize_int8, registry, w8a8_moe_gemm
from vllm_superl8.tools.measure import Row, cold_copies, time_us

NUM_EXPERTS, TOPK = 128, 8
PRODUCTS = {"w13": (1536, 2048, TOPK), "w2": (2048, 768, 1)}  # n, k, rows that share a row of x
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
QUICK_TOKENS = (1, 8, 2048)
GROUP_SIZES = (-1, 128)
CHECKED_TOKENS = 8
LARGEST_ERROR = 1e-3  # the result is rounded to fp16: 2^-11


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for n, k, x_repeat in PRODUCTS.values():
        for group_size in GROUP_SIZES:
            weights = [_experts(n, k, group_size) for _ in range(cold_copies(NUM_EXPERTS * n * k))]
            for tokens in QUICK_TOKENS if quick else TOKENS:
                yield moe_row(tokens, n, k, x_repeat, group_size, weights)


def moe_row(tokens: int, n: int, k: int, x_repeat: int, group_size: int, weights) -> Row:
    ids = torch.stack([torch.randperm(NUM_EXPERTS, device="cuda")[:TOPK] for _ in range(tokens)]).int()
    m = tokens * TOPK
    x, x_scales = quantize_int8(torch.randn(m // x_repeat, k, device="cuda", dtype=torch.float16), group_size)
    calls = [
        lambda weight=weight, scales=scales: w8a8_moe_gemm(x, x_scales, weight, scales, ids, x_repeat, torch.float16)
        for weight, scales in weights
    ]
    checked = min(tokens, CHECKED_TOKENS)
    own = slice(0, checked * TOPK // x_repeat)
    wanted = registry.OPS["w8a8_moe_gemm"].reference(
        x[own], x_scales[own], *weights[0], ids[:checked], x_repeat, torch.float32
    )
    got = calls[0]()[: checked * TOPK].float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"w8a8_moe_gemm tokens={tokens} n={n} k={k} group_size={group_size}: error {error:.2g}")
    touched = ids.unique().numel()
    fields = {"op": "w8a8_moe_gemm", "format": "int8", "group_size": group_size, "m": m, "n": n, "k": k}
    fields |= {"tokens": tokens, "touched_experts": touched}
    return Row(fields, time_us(calls), 2 * m * n * k, touched * n * k + x.numel() + 2 * m * n, error)


def _experts(n: int, k: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (NUM_EXPERTS, n, k), dtype=torch.int8, device="cuda")
    groups = 1 if group_size == -1 else k // group_size
    return codes, torch.rand(NUM_EXPERTS, n, groups, device="cuda") * 1e-3 + 1e-4
