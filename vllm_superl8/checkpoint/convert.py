# SPDX-License-Identifier: BSD-3-Clause
"""From decoded matrices of any scheme to the codes that our kernels multiply, exactly where the values allow it."""

import math

import torch

from vllm_superl8.checkpoint.matrix import Codes
from vllm_superl8.formats import int8


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
    error = (got - want).double().square().sum().item()
    return math.inf if error == 0 else 10 * math.log10(max(want.double().square().sum().item(), 1e-300) / error)
