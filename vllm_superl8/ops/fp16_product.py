# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 products of many rows by torch's fp16 matrix product, for cards whose tensor cores outrun their dp4a.

Codes are small integers, which fp16 holds exactly and whose products tensor cores add in fp32; scales follow at the
end as in the dp4a kernels. So the result is that of w8a8_gemm but for the rounding of long sums (and, with groups, of
the ratios between a row's scales), whatever the range of activations and weights. Weights are widened some rows at a
time into a scratch of bounded size. A kernel for m8n8k4 that widens in registers can take the place of this file.
"""

import torch

from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, stream

SCRATCH_BYTES = 64 << 20
"""Bound on the widened weights, and on the fp32 sums, that exist at a time."""

COLUMNS_STEP = 64
"""Outputs are made in multiples of it, at least."""


def fp16_product(module, x, x_scales, weight, weight_scales, bias, out) -> None:
    """Write the product to out (m, n), contiguous. Arguments as those of w8a8_gemm: x (m, k), bias of out's dtype."""
    (m, k), n = x.shape, weight.shape[0]
    bound = min(SCRATCH_BYTES // (2 * k), SCRATCH_BYTES // (4 * m))
    columns = max(COLUMNS_STEP, bound // COLUMNS_STEP * COLUMNS_STEP)
    a, b_scales = _widened(x, x_scales), _largest(weight_scales)
    a_scales = _largest(x_scales)
    for first in range(0, n, columns):
        part = slice(first, first + columns)
        sums = multiply(a, _widened(weight[part], weight_scales[part]))
        module.w8a8_scale_sums(
            DTYPE_NAMES[out.dtype], ptr(out), ptr(sums), ptr(a_scales), ptr(b_scales), ptr(bias), m, n, first,
            sums.shape[1], stream(x),
        )  # fmt: skip


def _largest(scales: torch.Tensor) -> torch.Tensor:
    """(rows, groups) -> (rows): the scale that _widened leaves to be applied."""
    return scales.amax(-1).contiguous()


def _widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes (rows, k) in fp16, each group multiplied by its scale over the row's largest."""
    if scales.shape[-1] == 1:
        return codes.half()
    ratios = (scales / scales.amax(-1, keepdim=True)).half()
    return (codes.unflatten(-1, (scales.shape[-1], -1)).half() * ratios.unsqueeze(-1)).flatten(-2)


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.T in fp32. On a CPU (tests), whose torch has no fp16 product with fp32 sums, through fp32."""
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T
