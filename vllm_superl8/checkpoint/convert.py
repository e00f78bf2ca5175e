# SPDX-License-Identifier: BSD-3-Clause
"""From decoded matrices of any scheme to the codes that our kernels multiply, exactly where the values allow it."""

import math

import torch

from vllm_superl8.checkpoint.matrix import Codes
from vllm_superl8.formats import int4, int8


def values(decoded: Codes | torch.Tensor) -> torch.Tensor:
    """(n, k) float32."""
    return decoded.values() if isinstance(decoded, Codes) else decoded


def to_int8(decoded: Codes | torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """int8 codes of a matrix (n, k), groups of group_size columns, -1 for the whole row.

    returns  codes (n, k) int8, scales (n, groups) float32, and the signal-to-noise ratio of their values against the
             given ones in dB, infinite where the codes are the stored ones

    Stored integers are taken over where int8 and the groups hold them, and otherwise quantised anew from their values.
    Raises ValueError if group_size does not divide k.
    """
    if isinstance(decoded, Codes):
        ordered, columns = decoded.in_order()
        if columns is None and (taken := _taken_over(ordered, group_size)) is not None:
            return *taken, math.inf
    given = values(decoded)
    codes, scales = int8.quantize(given, group_size)
    return codes, scales, sqnr_db(int8.dequantize(codes, scales), given)


def to_int4(
    decoded: Codes | torch.Tensor, group_size: int, zeros: bool, ordered: bool, scale_dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor | None, float]:
    """4-bit codes of a matrix (n, k) in groups of group_size columns (32, 64 or 128, dividing k).

    zeros    as format "int4_zero", else as "int4" (formats.int4)
    ordered  columns may be sorted into their groups
    returns  planes; which column each of theirs was (k) int32 if `ordered`, else None; and the signal-to-noise ratio in
             dB as in to_int8

    Raises ValueError for an activation order whose groups have different sizes.
    """
    columns = None
    if isinstance(decoded, Codes):
        k = decoded.codes.shape[1]
        if ordered:
            decoded, columns = decoded.in_order()
            if decoded.group_of is not None:
                raise ValueError("its activation order has groups of different sizes; give option weight_bits 8")
            columns = torch.arange(k, device=decoded.codes.device) if columns is None else columns
            columns = columns.int()
        else:
            decoded, moved = decoded.in_order()
            assert moved is None, "columns out of order need `ordered`"
        if (taken := _int4_taken_over(decoded, group_size, zeros, scale_dtype)) is not None:
            return taken, columns, math.inf
    given = values(decoded)
    planes = int4.quantize(given, group_size, symmetric=not zeros, scale_dtype=scale_dtype)
    return planes, columns, sqnr_db(int4.dequantize(planes), given)


def _int4_taken_over(stored: Codes, group_size: int, zeros: bool, scale_dtype) -> list[torch.Tensor] | None:
    groups, wanted = stored.scales.shape[1], stored.codes.shape[1] // group_size
    if wanted % groups:
        return None
    codes, own_zeros = stored.codes, stored.zeros
    if codes.dtype == torch.int8:
        codes = codes.short() + int4.ZERO
        own_zeros = None if own_zeros is None else own_zeros + int4.ZERO
    elif own_zeros is None:  # unsigned codes with a zero of 0
        own_zeros = torch.zeros_like(stored.scales)
    if own_zeros is not None and not zeros:
        return None
    for part in (codes, own_zeros):
        if part is not None and not (part.numel() and int(part.min()) >= 0 and int(part.max()) <= 15):
            return None
    planes = [int4.pack(codes), stored.scales.to(scale_dtype).repeat_interleave(wanted // groups, 1)]
    if zeros:
        own_zeros = torch.full_like(stored.scales, int4.ZERO) if own_zeros is None else own_zeros
        planes.append(own_zeros.to(torch.uint8).repeat_interleave(wanted // groups, 1))
    return [plane.contiguous() for plane in planes]


def _taken_over(stored: Codes, group_size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    k = stored.codes.shape[1]
    wanted = 1 if group_size == -1 else k // group_size
    groups = stored.scales.shape[1]
    if stored.group_of is not None or wanted % groups or (group_size != -1 and k % group_size):
        return None
    codes = stored.codes
    if stored.zeros is not None:
        codes = codes.short() - stored.per_column(stored.zeros.short())
    if codes.dtype != torch.int8:
        if codes.numel() and not -128 <= int(codes.min()) <= int(codes.max()) <= 127:
            return None
        codes = codes.to(torch.int8)
    return codes.contiguous(), stored.scales.repeat_interleave(wanted // groups, dim=1).contiguous()


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """10 log10(sum want^2 / sum (got - want)^2); infinite for no error."""
    error, signal = (got - want).norm().item(), want.norm().item()
    return math.inf if error == 0 else 20 * math.log10(max(signal, 1e-38) / error)
