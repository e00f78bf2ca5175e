# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel takes a W8A8 product: the one place that the ops ask. ops/tuning.py has the rates that it reckons with.

The choice does not reach the result where there is one scale a row; with group scales the order of a sum follows it.
"""

import functools
import math
from dataclasses import dataclass

from vllm_superl8.ops.tuning import SHIPPED, Tile, Tuning

GEMV_STEP = 512
"""Columns that one warp of the streaming kernel takes in a step (csrc/linear/int8_gemv.cuh)."""

BLOCK_GEMV_STEP = 1024
"""The same of the streaming kernel for weights in blocks (csrc/linear/block_gemv.cuh)."""

GEMV_ROWS_A_WARP = 4
"""Weight rows that its warp takes."""

GEMV_WARPS_AN_SM = 24
"""Warps that keep a multiprocessor's loads in flight."""

MOE_ROWS_AN_EXPERT = 2
"""Average rows an expert from which they are sorted into tiles: streaming reads an expert's weights once a row.
Reckoned, not measured: a tile of 32 rows takes about as long as reading its weights once (a V100 has 70 operations
for each byte it reads), so that two rows already gain."""


SPLIT_GAIN = 0.9
"""Share of the unsplit time that splitting has to come down to, so that a wrong reckoning costs little."""

FP16_GAIN = 0.95
"""The same for the fp16 product, whose rate is measured."""

FP16_LEAST_ROWS = 256
"""Rows of x from which the fp16 product is thought of: below, widening the weights takes as long as the product."""

MOST_SPLITS = 16

SPLIT_STEP, GROUPED_SPLIT_STEP = 128, 512
"""Columns that all blocks but the last of a tile take a multiple of: a K step of four slices."""


@dataclass(frozen=True)
class Plan:
    """How a product is computed.

    tile     name of the tile; None: torch's fp16 matrix product (ops/fp16_product.py)
    k_split  columns of K that a block sums, several blocks sharing a tile then (csrc/linear/gemm_split.cu); None: all
    """

    tile: str | None
    k_split: int | None = None


@functools.lru_cache(1 << 14)
def plan_for(
    m: int, n: int, k: int, grouped: bool, units: int, may_split: bool = True, tuning: Tuning = SHIPPED
) -> Plan:
    """The plan with which an m x n x k product takes the least time on a card of `units` multiprocessors.

    Each multiprocessor works through its share of the blocks at the tile's rate. may_split is false where rows do not
    start on 16 bytes, which the split kernels want.
    """
    whole = {Plan(tile.name): predicted_us(tuning, tile, m, n, k, k, units) for tile in tuning.tiles(grouped)}
    best = min(whole, key=whole.get)
    step = GROUPED_SPLIT_STEP if grouped else SPLIT_STEP
    parts = {math.ceil(k / splits / step) * step for splits in range(2, MOST_SPLITS + 1)} if may_split else ()
    split = {
        Plan(tile.name, k_split): predicted_us(tuning, tile, m, n, k, k_split, units)
        for tile in tuning.tiles(grouped)
        for k_split in sorted(parts, reverse=True)
        if tile.may_split and k_split < k
    }
    best_split = min(split, key=split.get, default=None)
    if best_split and split[best_split] < SPLIT_GAIN * whole[best]:
        best = best_split
    dp4a_us = (whole | split)[best]
    if tuning.fp16_macs_a_us and m >= FP16_LEAST_ROWS and fp16_us(tuning, m, n, k, units) < FP16_GAIN * dp4a_us:
        return Plan(None)
    return best


def predicted_us(tuning: Tuning, tile: Tile, m: int, n: int, k: int, k_split: int, units: int) -> float:
    """Microseconds that a tile's kernel should take, with k_split columns a block."""
    splits = math.ceil(k / k_split)
    share = math.ceil(math.ceil(m / tile.m) * math.ceil(n / tile.n) * splits / units)
    rate = tile.full if share >= tile.blocks else tile.sparse
    product = share * tile.m * tile.n * k_split / (rate * tuning.macs_a_us)
    if splits == 1:
        return product
    partial_bytes = 2 * 4 * splits * m * n  # written and read
    return product + tuning.sum_us + partial_bytes / (units * tuning.bytes_a_us)


def fp16_us(tuning: Tuning, m: int, n: int, k: int, units: int) -> float:
    """Microseconds that fp16_product should take."""
    widening_bytes = 3 * (m + n) * k  # codes are read, fp16 is written
    sums_bytes = (4 + 4 + 2) * m * n  # written and read, then the result
    product = m * n * k / tuning.fp16_macs_a_us
    return (product + (widening_bytes + sums_bytes) / tuning.bytes_a_us) / units


BLOCK_GEMV_MOST_ROWS = 8
"""Rows of x up to which weights in blocks are streamed: as many as the kernel takes."""

BLOCK_TILES = (
    Tile(64, 64, blocks=1, full=0.70, sparse=0.70),
    Tile(32, 64, blocks=2, full=0.60, sparse=0.50),
)
"""Tiles of weights in blocks (csrc/linear/block_gemm.cu). Reckoned from those with grouped scales, not measured."""


def block_tile_for(m: int, n: int, units: int) -> str:
    """Name of the tile with which m x n outputs of weights in blocks take the least time."""
    return min(BLOCK_TILES, key=lambda tile: predicted_us(SHIPPED, tile, m, n, 1, 1, units)).name


def k_warps_for(n: int, k: int, units: int, rows: int = 1, step: int = GEMV_STEP) -> int:
    """Warps that share the columns of a weight row in the streaming kernel: as few as fill the card.

    n, k   of the weights
    units  multiprocessors of the card
    rows   how often weights are streamed side by side (routed rows; all rows of one product count as one)
    step   columns that a warp takes in a step
    """
    wanted = GEMV_WARPS_AN_SM * units
    warps = math.ceil(n / GEMV_ROWS_A_WARP) * rows
    split = 1
    while split < 8 and warps * split < wanted and split * step < k:
        split *= 2
    return split


def moe_tile_for(rows: int, num_experts: int, grouped: bool) -> Tile | None:
    """Tile for `rows` routed rows, or None where weights are better streamed once a row."""
    an_expert = rows / num_experts
    if an_expert < MOE_ROWS_AN_EXPERT:
        return None
    sizes = {tile.name: tile for tile in SHIPPED.tiles(grouped)}
    small = "32x64" if grouped else "32x32"
    return sizes["64x64" if an_expert > 32 else small]  # a tile holds rows of one expert only
