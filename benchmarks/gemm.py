# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 matrix products at the layers of Llama-3-8B, Qwen3-8B and Qwen3-30B-A3B, with torch's fp16 product beside them.

    w8a8_gemm    codes times codes, group_size -1 (one scale a row) or 128
    w8a8_linear  quantize_int8 and w8a8_gemm, as a layer runs them: up to 64 rows, where it shows
    torch_fp16   torch.nn.functional.linear on fp16 (cuBLAS)

share_llama_cpp is what llama.cpp's Q8_0 product reaches of the same ceilings: of dp4a from 16 rows on, below of memory.
"""

from collections.abc import Iterator

import torch

from vllm_superl8.ops import quantize_int8, registry, w8a8_gemm
from vllm_superl8.tools.measure import Row, cold_copies, time_us

LAYERS = {  # (n, k): whose
    (14336, 4096): "gate or up of Llama-3-8B, for comparison",
    (4096, 4096): "o of Llama-3-8B and Qwen3-8B",
    (4096, 14336): "down of Llama-3-8B",
    (6144, 4096): "qkv of both",
    (28672, 4096): "gate and up of Llama-3-8B",
    (24576, 4096): "gate and up of Qwen3-8B",
    (4096, 12288): "down of Qwen3-8B",
    (5120, 2048): "qkv of Qwen3-30B-A3B",
    (2048, 4096): "o of Qwen3-30B-A3B",
    (151936, 4096): "LM head of Qwen3-8B",
}
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
QUICK_LAYERS = ((14336, 4096), (4096, 4096), (4096, 14336))
QUICK_ROWS = (1, 16, 256, 2048)
GROUP_SIZES = (-1, 128)
LINEAR_MOST_ROWS = 64
CHECKED_ROWS = 64
LARGEST_ERROR = 1e-3  # the result is rounded to fp16: 2^-11

# llama.cpp's integer kernels for Q8_0 weights, built for compute_70 and measured by this project on an NVIDIA H200
# (ceilings 131.6 dp4a TOPS, 4557 GB/s): share of the ceiling by (m, n, k).
LLAMA_CPP = {
    (1, 14336, 4096): 0.59,
    (2, 14336, 4096): 0.59 / 1.03,
    (4, 14336, 4096): 0.59 / 1.27,
    (8, 14336, 4096): 0.59 / 1.93,
    (1, 4096, 4096): 0.42,
    (16, 14336, 4096): 0.23,
    (32, 14336, 4096): 0.33,
    (64, 14336, 4096): 0.44,
    (128, 4096, 4096): 0.45,
    (512, 4096, 14336): 0.62,
    (2048, 14336, 4096): 0.65,
}


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    wanted = QUICK_ROWS if quick else ROWS
    for n, k in QUICK_LAYERS if quick else LAYERS:
        for group_size in GROUP_SIZES:
            weights = [quantize_int8(_normal(n, k), group_size) for _ in range(cold_copies(n * k))]
            for m in wanted:
                yield gemm_row(m, n, k, group_size, weights)
                if m <= LINEAR_MOST_ROWS:
                    yield linear_row(m, n, k, group_size, weights)
        del weights
        weights = [_normal(n, k) for _ in range(cold_copies(2 * n * k))]
        for m in wanted:
            yield fp16_row(m, n, k, weights)


def gemm_row(m: int, n: int, k: int, group_size: int, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Row:
    x, x_scales = quantize_int8(_normal(m, k), group_size)
    calls = [
        lambda weight=weight, scales=scales: w8a8_gemm(x, x_scales, weight, scales, None, torch.float16)
        for weight, scales in weights
    ]
    checked = slice(0, CHECKED_ROWS)
    reference = registry.OPS["w8a8_gemm"].reference
    wanted = reference(x[checked], x_scales[checked], *weights[0], None, torch.float32)
    return _row("w8a8_gemm", "int8", group_size, m, n, k, calls, wanted, n * k + m * k + 2 * m * n)


def linear_row(m: int, n: int, k: int, group_size: int, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Row:
    x = _normal(m, k)
    calls = [
        lambda weight=weight, scales=scales: w8a8_gemm(
            *quantize_int8(x, group_size), weight, scales, None, torch.float16
        )
        for weight, scales in weights
    ]
    codes, x_scales = quantize_int8(x, group_size)
    wanted = registry.OPS["w8a8_gemm"].reference(codes, x_scales, *weights[0], None, torch.float32)
    return _row("w8a8_linear", "int8", group_size, m, n, k, calls, wanted, n * k + 2 * m * k + 2 * m * n)


def fp16_row(m: int, n: int, k: int, weights: list[torch.Tensor]) -> Row:
    x = _normal(m, k)
    calls = [lambda weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
    wanted = x[:CHECKED_ROWS].float() @ weights[0].float().T
    return _row("torch_fp16", "fp16", None, m, n, k, calls, wanted, 2 * (n * k + m * k + m * n))


def _row(op, name, group_size, m, n, k, calls, wanted, num_bytes) -> Row:
    error = _relative_error(calls[0]()[:CHECKED_ROWS], wanted)
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"{op} m={m} n={n} k={k} group_size={group_size}: relative error {error:.2g}")
    peer = LLAMA_CPP.get((m, n, k)) if name == "int8" else None
    fields = {"op": op, "format": name, "group_size": group_size, "m": m, "n": n, "k": k, "share_llama_cpp": peer}
    return Row(fields, time_us(calls), 2 * m * n * k, num_bytes, error)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
