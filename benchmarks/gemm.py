# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 matrix products and the quantisation in front of them, at the layer shapes of an 8B model."""

from collections.abc import Iterator

import torch

from vllm_superl8.ops import quantize_int8, registry, w8a8_gemm
from vllm_superl8.tools.measure import Row, cold_copies, time_us

LAYERS = ((14336, 4096), (4096, 4096), (4096, 14336))  # (n, k)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (1, 16, 256, 2048)
GROUP_SIZES = (-1, 128)
CHECKED_ROWS = 64
LARGEST_ERROR = 1e-3  # the result is rounded to fp16: 2^-11


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    wanted = QUICK_ROWS if quick else ROWS
    for n, k in LAYERS:
        for group_size in GROUP_SIZES:
            weights = [
                quantize_int8(torch.randn(n, k, device="cuda", dtype=torch.float16), group_size)
                for _ in range(cold_copies(n * k))
            ]
            for m in wanted:
                yield gemm_row(m, n, k, group_size, weights)
    for k in sorted({k for _, k in LAYERS}):
        for m in wanted:
            yield quantize_row(m, k)


def gemm_row(m: int, n: int, k: int, group_size: int, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Row:
    x, x_scales = quantize_int8(torch.randn(m, k, device="cuda", dtype=torch.float16), group_size)
    calls = [
        lambda weight=weight, scales=scales: w8a8_gemm(x, x_scales, weight, scales, None, torch.float16)
        for weight, scales in weights
    ]
    checked = slice(0, CHECKED_ROWS)
    reference = registry.OPS["w8a8_gemm"].reference
    wanted = reference(x[checked], x_scales[checked], *weights[0], None, torch.float32)
    error = relative_error(calls[0]()[checked], wanted)
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"w8a8_gemm m={m} n={n} k={k} group_size={group_size}: relative error {error:.2g}")
    fields = {"op": "w8a8_gemm", "format": "int8", "group_size": group_size, "m": m, "n": n, "k": k}
    return Row(fields, time_us(calls), 2 * m * n * k, n * k + m * k + 2 * m * n, error)


def quantize_row(m: int, k: int) -> Row:
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.float16) for _ in range(cold_copies(2 * m * k))]
    calls = [lambda x=x: quantize_int8(x, -1) for x in inputs]
    codes, scales = calls[0]()
    wanted_codes, wanted_scales = registry.OPS["quantize_int8"].reference(inputs[0], -1)
    if not (torch.equal(codes, wanted_codes) and torch.equal(scales, wanted_scales)):
        raise RuntimeError(f"quantize_int8 m={m} k={k}: kernel and reference differ")
    fields = {"op": "quantize_int8", "format": "int8", "group_size": -1, "m": m, "n": None, "k": k}
    return Row(fields, time_us(calls), None, 3 * m * k + 4 * m, 0.0)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
