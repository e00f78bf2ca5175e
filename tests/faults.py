# SPDX-License-Identifier: BSD-3-Clause
"""Ways in which a result can be wrong. Every limit must reject each of them (tests/test_tolerances.py)."""

from collections.abc import Callable

import torch


def all_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def tenfold(x: torch.Tensor) -> torch.Tensor:
    return x * 10


def one_scale_wrong(x: torch.Tensor) -> torch.Tensor:
    """A group of 32 columns (or what there is) of the first row is four times too large."""
    x = x.clone()
    x.view(-1, x.shape[-1])[0, :32] *= 4
    return x


def one_row_shifted(x: torch.Tensor) -> torch.Tensor:
    """The last row is one element further."""
    x = x.clone()
    rows = x.view(-1, x.shape[-1])
    rows[-1] = rows[-1].roll(1)
    return x


def one_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[-1] = float("nan")
    return x


def nibbles_swapped(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes with the halves of every byte exchanged."""
    return (codes << 4) | (codes >> 4)


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    fault.__name__: fault for fault in (all_zero, negated, tenfold, one_scale_wrong, one_row_shifted, one_nan)
}
"""Faults of a floating-point result (..., n), n >= 2, contiguous."""
