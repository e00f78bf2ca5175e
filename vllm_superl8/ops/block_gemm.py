# SPDX-License-Identifier: BSD-3-Clause
"""Matrix product of int8 activations with weights that stay in their own bytes: GGUF types and 4-bit checkpoints."""

import torch

from vllm_superl8.device import multiprocessors
from vllm_superl8.formats import blocks
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.ops import linear
from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, register, stream

CHUNK_VALUES = 1 << 18
"""Weights that the reference decodes at a time: 1 MB of float32, which stays in a core's cache."""


def _check(x, x_scales, planes, format, out_dtype) -> blocks.Layout:
    layout = blocks.layout_of(format)
    k = x.shape[-1]
    if x.dtype != torch.int8 or x_scales.dtype != torch.float32:
        raise TypeError(
            f"block_gemm: x is {x.dtype} with {x_scales.dtype} scales, wanted int8 and float32, as quantize_int8(x, "
            f"{UNIT}) makes them"
        )
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"block_gemm: out_dtype is {out_dtype}, wanted one of {', '.join(map(str, DTYPE_NAMES))}")
    blocks.check_planes(planes, layout, k)
    if x_scales.shape != (*x.shape[:-1], k // UNIT):
        raise ValueError(
            f"block_gemm: x {tuple(x.shape)} has scales {tuple(x_scales.shape)}, wanted one for every {UNIT} columns"
        )
    return layout


def planes_arguments(op: str, planes, layout: blocks.Layout, k: int) -> tuple:
    """What launchers take of a matrix: format, addresses of planes, codebook, group size and kind of scales.

    Raises ValueError for planes that are not contiguous.
    """
    if not all(plane.is_contiguous() for plane in planes):
        raise ValueError(f"{op}: planes of format {layout.name} are not contiguous; store them with .contiguous()")
    group_size, wide_scales = UNIT, False
    if not layout.ggml:
        group_size, wide_scales = k // planes[1].shape[1], planes[1].dtype == torch.float32
    codebook = blocks.codebook(layout, planes[0].device)
    return layout.name, [ptr(plane) for plane in planes], ptr(codebook), group_size, wide_scales


def block_gemm_reference(x, x_scales, planes, format, bias, out_dtype):
    layout = _check(x, x_scales, planes, format, out_dtype)
    k, n = x.shape[-1], planes[0].shape[0]
    rows = (x.reshape(-1, k // UNIT, UNIT) * x_scales.reshape(-1, k // UNIT, 1)).flatten(1)
    out = torch.empty(rows.shape[0], n, dtype=torch.float32, device=x.device)
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, n, step):
        found = blocks.decode([plane[start : start + step] for plane in planes], layout)
        out[:, start : start + step] = rows @ found.codes.float().mul_(found.scales.unsqueeze(-1)).flatten(1).T
        if found.minima is not None:  # times sums of x, as the kernels do it
            sums = rows.unflatten(1, (found.minima.shape[1], -1)).sum(-1)
            out[:, start : start + step] += sums @ found.minima.T
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype).reshape(*x.shape[:-1], n)


def block_gemm_fake(x, x_scales, planes, format, bias, out_dtype):
    return torch.empty((*x.shape[:-1], planes[0].shape[0]), dtype=out_dtype, device=x.device)


def block_gemm_kernel(module, x, x_scales, planes, format, bias, out_dtype):
    layout = _check(x, x_scales, planes, format, out_dtype)
    if bias is not None:
        bias = bias.to(out_dtype).contiguous()
    out = block_gemm_fake(x, x_scales, planes, format, bias, out_dtype)
    x, x_scales = x.contiguous(), x_scales.contiguous()
    k, n = x.shape[-1], planes[0].shape[0]
    m = x.numel() // k
    arguments = (
        DTYPE_NAMES[out_dtype], ptr(out), ptr(x), ptr(x_scales), *planes_arguments("block_gemm", planes, layout, k),
        ptr(bias), m, n, k, stream(x),
    )  # fmt: skip
    units = multiprocessors(x.device)
    if m <= linear.BLOCK_GEMV_MOST_ROWS:
        module.block_gemv(linear.k_warps_for(n, k, units, step=linear.BLOCK_GEMV_STEP), *arguments)
    else:
        module.block_gemm(linear.block_tile_for(m, n, units), *arguments)
    return out


block_gemm = register(
    "block_gemm",
    "(Tensor x, Tensor x_scales, Tensor[] planes, str format, Tensor? bias, ScalarType out_dtype) -> Tensor",
    reference=block_gemm_reference,
    fake=block_gemm_fake,
    kernel=block_gemm_kernel,
)
"""out = (x * x_scales) @ weight.T + bias, the weight being decoded from its planes as it is read.

x          (..., k) int8
x_scales   (..., k / 32) float32
planes     the weight (n, k) in a format of formats.layout.LAYOUTS that has planes; contiguous. formats.blocks.pack
           makes them from GGUF rows, formats.int4.quantize from floats
format     its name, such as "q4_k" or "int4"
bias       (n), any float dtype (rounded to out_dtype first), or None
returns    (..., n) in out_dtype: float16, bfloat16 or float32

The kernels sum the products of 32 columns (16, where the format has a scale for 16) exactly in integers, scale the sums
and add them in float32, in an order that depends on the kernel but not on other rows of x. Deterministic.
Raises TypeError for wrong dtypes, ValueError for an unknown format, planes that do not fit k, or ones that are not
contiguous.
"""
