# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 tune``: measure how fast the W8A8 kernels are on this card, for ops/linear.py to plan with.

The file goes to the user's cache, one a card name and driver version; it is read when a server first multiplies, which
costs a millisecond. Nothing is measured while serving.
"""

import argparse
import math
import sys
from dataclasses import replace
from typing import Protocol

from vllm_superl8.ops import linear
from vllm_superl8.ops.tuning import SHIPPED, Tile, Tuning, path_of, save

K = 4096
FULL_BLOCKS = 4
"""Generations of resident blocks with which a tile's full rate is measured."""

MATMUL = (2048, 4096, 4096)  # m, n, k
GEMV_N = 4096


class Timer(Protocol):
    """What tune() asks of a card: microseconds of one product each, with operands that are not in the L2 cache."""

    units: int  # multiprocessors

    def gemm_us(self, tile: str, m: int, n: int, k: int, grouped: bool, k_split: int | None = None) -> float: ...
    def gemv_us(self, m: int, n: int, k: int) -> float: ...
    def fp16_us(self, m: int, n: int, k: int) -> float: ...


def tune(timer: Timer, dp4a_tops: float, hbm_gbps: float) -> Tuning:
    """What the timer says of every tile, of splitting, streaming and fp16 products."""
    units = timer.units
    macs_a_us = dp4a_tops * 1e6 / 2 / units
    tiles = {
        name: tuple(_tile_rates(timer, tile, name == "grouped", macs_a_us) for tile in getattr(SHIPPED, name))
        for name in ("per_row", "grouped")
    }
    m, n, k = MATMUL
    tuning = replace(
        SHIPPED,
        **tiles,
        macs_a_us=macs_a_us,
        bytes_a_us=hbm_gbps * 1e3 / units,
        sum_us=_sum_us(timer),
        fp16_macs_a_us=m * n * k / timer.fp16_us(m, n, k) / units,
    )
    return replace(tuning, gemv_most_rows=_gemv_most_rows(timer, tuning))


def _tile_rates(timer: Timer, tile: Tile, grouped: bool, macs_a_us: float) -> Tile:
    def rate(rows: int, columns: int) -> float:
        share = math.ceil(rows * columns / timer.units)
        us = timer.gemm_us(tile.name, rows * tile.m, columns * tile.n, K, grouped)
        return share * tile.m * tile.n * K / (us * macs_a_us)

    full = rate(FULL_BLOCKS, tile.blocks * timer.units)
    return replace(tile, full=full, sparse=full if tile.blocks == 1 else rate(1, timer.units))


def _sum_us(timer: Timer) -> float:
    """Two parts side by side take as long as one of them alone, and what adding them costs."""
    tile = next(tile for tile in SHIPPED.per_row if tile.name == "32x32")
    columns = tile.n * max(1, timer.units // 2)
    split = timer.gemm_us(tile.name, tile.m, columns, 2 * K, False, K)
    return max(0.5, split - timer.gemm_us(tile.name, tile.m, columns, K, False))


def _gemv_most_rows(timer: Timer, tuning: Tuning) -> int:
    for m in range(SHIPPED.gemv_most_rows, 1, -1):
        plan = linear.plan_for(m, GEMV_N, K, False, timer.units, tuning=tuning)
        if timer.gemv_us(m, GEMV_N, K) <= timer.gemm_us(plan.tile, m, GEMV_N, K, False, plan.k_split):
            return m
    return 1


class KernelTimer:
    """Timer of the compiled kernels.

    module   vllm_superl8._C (or the tests' emulator)
    device   torch device of the operands
    time_us  time_us(calls): microseconds of one of them, as measure.time_us
    copies   copies(bytes): how many copies of an operand to take in turn, as measure.cold_copies
    """

    def __init__(self, module, device, units: int, time_us, copies):
        self.module, self.device, self.units, self.time_us, self.copies = module, device, units, time_us, copies

    def gemm_us(self, tile, m, n, k, grouped, k_split=None):
        import torch

        from vllm_superl8.ops.registry import ptr, stream

        groups = k // 128 if grouped else 1
        x, x_scales, weights, w_scales, out = self._operands(m, n, k, groups)
        sizes = (m, n, k, groups)
        partial = k_split and torch.empty(math.ceil(k / k_split), m, n, dtype=torch.int32, device=self.device)

        def call(weight):
            operands = ("fp16", *map(ptr, (out, x, x_scales, weight, w_scales)), 0, *sizes)
            if k_split is None:
                return self.module.w8a8_gemm(tile, *operands, stream(x))
            return self.module.w8a8_gemm_split(tile, *operands, ptr(partial), k_split, stream(x))

        return self._timed(call, weights)

    def gemv_us(self, m, n, k):
        from vllm_superl8.ops.registry import ptr, stream

        x, x_scales, weights, w_scales, out = self._operands(m, n, k, 1)
        k_warps = linear.k_warps_for(n, k, self.units)
        pointers = (out, x, x_scales)
        return self._timed(
            lambda weight: self.module.w8a8_gemv(
                k_warps, "fp16", *map(ptr, pointers), ptr(weight), ptr(w_scales), 0, m, n, k, 1, stream(x)
            ),
            weights,
        )

    def fp16_us(self, m, n, k):
        """torch's product as ops/fp16_product.py calls it, without what comes before and after."""
        import torch

        from vllm_superl8.ops.fp16_product import multiply

        a, b = (torch.ones(rows, k, dtype=torch.float16, device=self.device) for rows in (m, n))
        return self._timed(lambda other: multiply(a, other), [b])

    def _operands(self, m, n, k, groups):
        import torch

        def codes(rows):
            return torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=self.device)

        x_scales, w_scales = (torch.ones(rows, groups, device=self.device) for rows in (m, n))
        out = torch.empty(m, n, dtype=torch.float16, device=self.device)
        return codes(m), x_scales, [codes(n) for _ in range(self.copies(n * k))], w_scales, out

    def _timed(self, call, weights):
        return self.time_us([lambda weight=weight: call(weight) for weight in weights])


def render(tuning: Tuning, units: int) -> str:
    """The measured numbers beside the shipped ones."""
    lines = [f"{'tile':<18}{'full':>7}{'shipped':>9}{'sparse':>8}{'shipped':>9}"]
    for name in ("per_row", "grouped"):
        for tile, shipped in zip(getattr(tuning, name), getattr(SHIPPED, name), strict=True):
            label = tile.name + (" grouped" if name == "grouped" else "")
            lines.append(f"{label:<18}{tile.full:>7.0%}{shipped.full:>9.0%}{tile.sparse:>8.0%}{shipped.sparse:>9.0%}")
    fp16, dp4a = (rate * units * 2 / 1e6 for rate in (tuning.fp16_macs_a_us, tuning.macs_a_us))
    lines.append(
        f"dp4a {dp4a:.1f} TOPS, fp16 products {fp16:.1f} TFLOPS, memory {tuning.bytes_a_us * units / 1e3:.0f} GB/s, "
        f"adding parts {tuning.sum_us:.1f} us, weights streamed up to {tuning.gemv_most_rows} rows"
    )
    m, n, k = MATMUL
    taken = linear.plan_for(m, n, k, False, units, tuning=tuning).tile is None
    lines.append(f"{m} rows x {n} x {k}: {'fp16 products' if taken else 'dp4a'}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forget", action="store_true", help="delete this card's numbers and use the shipped ones")


def run(args: argparse.Namespace) -> int:
    import torch

    from vllm_superl8 import device
    from vllm_superl8.ops import registry
    from vllm_superl8.tools import measure

    if not torch.cuda.is_available():
        print("tune: there is no GPU that torch can use; superl8 doctor says why", file=sys.stderr)
        return 1
    card, driver = torch.cuda.get_device_name(), device.driver_version()
    if args.forget:
        path_of(card, driver).unlink(missing_ok=True)
        return 0
    if registry.COMPILED is None:
        print(f"tune: the kernels are missing: {registry.NO_KERNELS_REASON}", file=sys.stderr)
        return 1
    current = torch.device("cuda", torch.cuda.current_device())
    units, ceilings = device.multiprocessors(current), measure.ceilings()
    timer = KernelTimer(registry.COMPILED, current, units, measure.time_us, measure.cold_copies)
    tuning = tune(timer, ceilings.dp4a_tops, ceilings.hbm_gbps)
    path = save(tuning, card, driver, registry.COMPILED.build_info()["source_hash"])
    print(f"{card}, driver {driver}\n{render(tuning, units)}\nwritten to {path}")
    return 0
