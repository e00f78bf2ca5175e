# SPDX-License-Identifier: BSD-3-Clause
"""Matrix products with GGUF weights in their own blocks, activations quantised in each call, at 8B layer shapes."""

from collections.abc import Iterator

import torch

from vllm_superl8.formats import blocks
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.formats.layout import GGML, Layout
from vllm_superl8.ops import block_gemm, quantize_int8, registry
from vllm_superl8.tools.measure import Row, cold_copies, time_us

LAYERS = ((14336, 4096), (4096, 4096), (4096, 14336))  # (n, k)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
QUICK_LAYERS = ((14336, 4096),)
QUICK_ROWS = (1, 8, 512)
CHECKED_ROWS = 64
LARGEST_ERROR = 4e-3  # the result is rounded to bfloat16: 2^-8
LARGEST_BYTE = 0x77
"""Bytes up to this give finite fp16 numbers and MXFP4 exponents wherever they stand in a block."""


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for layout in GGML.values():
        for n, k in QUICK_LAYERS if quick else LAYERS:
            size = n * k // layout.values * layout.bytes
            weights = [random_planes(n, k, layout, "cuda") for _ in range(cold_copies(size))]
            for m in QUICK_ROWS if quick else ROWS:
                yield block_row(m, n, k, layout, weights)


def random_planes(n: int, k: int, layout: Layout, device: str) -> list[torch.Tensor]:
    """A matrix of random valid blocks."""
    shape = (n, k // layout.values * layout.bytes)
    return blocks.pack(torch.randint(0, LARGEST_BYTE + 1, shape, dtype=torch.uint8, device=device), layout)


def block_row(m: int, n: int, k: int, layout: Layout, weights: list[list[torch.Tensor]]) -> Row:
    x = torch.randn(m, k, device=weights[0][0].device, dtype=torch.float16)
    calls = [
        lambda planes=planes: block_gemm(*quantize_int8(x, UNIT), planes, layout.name, None, torch.bfloat16)
        for planes in weights
    ]
    wanted = registry.OPS["block_gemm"].reference(
        *quantize_int8(x[:CHECKED_ROWS], UNIT), weights[0], layout.name, None, torch.float32
    )
    error = ((calls[0]()[:CHECKED_ROWS].float() - wanted).norm() / wanted.norm()).item()
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"block_gemm {layout.name} m={m} n={n} k={k}: relative error {error:.2g}")
    fields = {"op": "block_gemm", "format": layout.name, "m": m, "n": n, "k": k}
    moved = n * k // layout.values * layout.bytes + 2 * m * k + 2 * m * n
    return Row(fields, time_us(calls), 2 * m * n * k, moved, error)
