# SPDX-License-Identifier: BSD-3-Clause
"""What stands in front of a W8A8 product, fused and one by one: norm, gated activation, quantisation."""

from collections.abc import Callable, Iterator

import torch

from vllm_superl8.ops import (
    act_and_mul,
    act_and_mul_quantize,
    add_rms_norm_quantize,
    fused_add_rms_norm,
    quantize_int8,
    registry,
)
from vllm_superl8.tools.measure import Row, cold_copies, time_us

HIDDEN, INTERMEDIATE, EXPERT = 4096, 14336, 768  # Llama-3-8B; the experts of Qwen3-30B-A3B
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (1, 2048)
EPS = 1e-6
MOST_OTHER_CODES = 0.01  # the norm's sum, in another order, moves some values over the edge of a code


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for m in QUICK_ROWS if quick else ROWS:
        for group_size in (-1, 128):
            yield from norm_rows(m, group_size)
            for n in (INTERMEDIATE, EXPERT):
                yield from activation_rows(m, n, group_size)
        yield quantize_row(m)


def norm_rows(m: int, group_size: int) -> Iterator[Row]:
    weight, inputs = _normal(HIDDEN), [HIDDEN, HIDDEN]

    def fused(x, residual):
        return add_rms_norm_quantize(x, residual, weight, EPS, 0.0, group_size)[:2]

    def separate(x, residual):
        return quantize_int8(fused_add_rms_norm(x, residual, weight, EPS), group_size)

    def reference(x, residual):
        return registry.OPS["add_rms_norm_quantize"].reference(x, residual, weight, EPS, 0.0, group_size)[:2]

    yield _row("add_rms_norm_quantize", m, HIDDEN, group_size, inputs, fused, reference, 7)
    yield _row("fused_add_rms_norm, quantize_int8", m, HIDDEN, group_size, inputs, separate, reference, 11)


def activation_rows(m: int, n: int, group_size: int) -> Iterator[Row]:
    def fused(x):
        return act_and_mul_quantize(x, "silu", group_size=group_size)

    def separate(x):
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        act_and_mul(out, x, "silu")
        return quantize_int8(out, group_size)

    def reference(x):
        return registry.OPS["act_and_mul_quantize"].reference(x, "silu", group_size=group_size)

    yield _row("act_and_mul_quantize", m, n, group_size, [2 * n], fused, reference, 5)
    yield _row("act_and_mul, quantize_int8", m, n, group_size, [2 * n], separate, reference, 9)


def quantize_row(m: int) -> Row:
    return _row("quantize_int8", m, HIDDEN, -1, [HIDDEN], quantize_int8, registry.OPS["quantize_int8"].reference, 3)


def _row(
    op: str,
    m: int,
    k: int,
    group_size: int,
    widths: list[int],
    call: Callable,
    reference: Callable,
    column_bytes: int,
) -> Row:
    """Inputs are (m, width) for each of widths, codes (m, k); column_bytes are moved for each of their columns."""
    copies = [[_normal(m, width) for width in widths] for _ in range(cold_copies(2 * m * sum(widths)))]
    codes, _ = call(*(x.clone() for x in copies[0]))
    wanted, _ = reference(*(x.clone() for x in copies[0]))
    error = (codes != wanted).float().mean().item()
    if not error < MOST_OTHER_CODES:
        raise RuntimeError(f"{op} m={m} k={k} group_size={group_size}: {error:.1%} of the codes differ")
    fields = {"op": op, "format": "int8", "group_size": group_size, "m": m, "n": None, "k": k}
    calls = [lambda given=given: call(*given) for given in copies]
    return Row(fields, time_us(calls), None, column_bytes * m * k, error)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)
