# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric int8 with one fp32 scale a row, or a row and group of columns: the reference codec.

scale = max|x| / 127, kept in float32 because fp16 scales overflow; a group of zeros has scale 1;
code = round-half-even(x / scale) in [-127, 127], never -128. Device codec: csrc/formats/int8.cuh.
"""

import torch

CODE_MAX = 127


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., k) float -> codes (..., k) int8, scales (..., k / group_size) float32; group_size -1 is the whole row.

    NaN or infinity in a group gives it a scale of NaN or infinity and codes of 0, so that the result cannot pass for a
    number. Raises ValueError if group_size does not divide k.
    """
    k = x.shape[-1]
    if group_size != -1 and (group_size < 1 or k % group_size):
        raise ValueError(f"int8.quantize: group_size {group_size} does not divide rows of {k}")
    grouped = x.float().unflatten(-1, (1, k) if group_size == -1 else (k // group_size, group_size))
    amax = grouped.abs().amax(-1)
    scales = amax / torch.full_like(amax, CODE_MAX)  # by a plain number, CUDA would multiply by its inverse
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = torch.round(grouped / scales.unsqueeze(-1)).nan_to_num(0.0).clamp(-CODE_MAX, CODE_MAX)
    return codes.to(torch.int8).flatten(-2), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """codes (..., k) int8 and scales (..., groups) float32 -> (..., k) in dtype.

    Raises ValueError if the groups do not divide k.
    """
    k, groups = codes.shape[-1], scales.shape[-1]
    if groups < 1 or k % groups:
        raise ValueError(f"int8.dequantize: {groups} scales a row do not divide rows of {k}")
    grouped = codes.float().unflatten(-1, (groups, k // groups)) * scales.unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)
