# SPDX-License-Identifier: BSD-3-Clause
"""Operands of W8A8 products for tests, and what the products are, in exact integers and in float64."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Operands:
    """x (m, k), w (n, k) int8 with scales (.., groups) float32; the codes of some columns are all near the largest."""

    x: torch.Tensor
    x_scales: torch.Tensor
    w: torch.Tensor
    w_scales: torch.Tensor

    def on(self, device) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(device) for t in (self.x, self.x_scales, self.w, self.w_scales))


def codes(*shape, seed):
    """int8 codes with a mean of 8, of which every 32nd column has the largest: outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    c = torch.randint(-119, 128, shape, generator=generator)
    c[..., ::32] = torch.randint(120, 128, c[..., ::32].shape, generator=generator)
    return c.to(torch.int8)


def scales(*shape, seed):
    """float32 scales between 0.001 and 0.1, log-uniform, with all mantissa bits in use."""
    return 10 ** (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 3)


def operands(m, n, k, groups, seed=0) -> Operands:
    return Operands(
        codes(m, k, seed=seed),
        scales(m, groups, seed=seed + 1),
        codes(n, k, seed=seed + 2),
        scales(n, groups, seed=seed + 3),
    )


def product(o: Operands, bias=None) -> torch.Tensor:
    """The product in float64."""
    groups = o.x_scales.shape[-1]
    x = o.x.double().unflatten(-1, (groups, -1)) * o.x_scales.double().unsqueeze(-1)
    w = o.w.double().unflatten(-1, (groups, -1)) * o.w_scales.double().unsqueeze(-1)
    out = x.flatten(-2) @ w.flatten(-2).T
    return out if bias is None else out + bias.double()


def integer_product(x, w) -> torch.Tensor:
    """x @ w.T in int64."""
    return x.long() @ w.long().T
