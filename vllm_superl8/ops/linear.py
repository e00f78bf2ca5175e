# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel takes a W8A8 product: the one table that the ops ask.

The numbers come from the prototype of these kernels on an NVIDIA H200 (132 SMs, compute_70 PTX, cold weights). The
choice does not reach the result where there is one scale a row; with group scales the order of a sum follows it.
"""

import functools
import math
from dataclasses import dataclass

GEMV_MOST_ROWS = 8
"""Rows of x up to which weights are streamed (14336x4096: 87 % of memory rate at m = 1, 73 % at 8). Beyond it a tile of
16 rows is as fast."""

GEMV_STEP = 512
"""Columns that one warp of the streaming kernel takes in a step (csrc/linear/int8_gemv.cuh)."""

GEMV_ROWS_A_WARP = 4
"""Weight rows that its warp takes."""

GEMV_WARPS_AN_SM = 24
"""Warps that keep a multiprocessor's loads in flight."""

MOE_ROWS_AN_EXPERT = 2
"""Average rows an expert from which they are sorted into tiles: streaming reads an expert's weights once a row.
Reckoned, not measured: a tile of 32 rows takes about as long as reading its weights once (a V100 has 70 operations
for each byte it reads), so that two rows already gain."""


# Splitting K, reckoned and not measured: a V100's 80 multiprocessors at 63 dp4a TOPS and 900 GB/s.
MACS_A_US = 4e5
"""dp4a multiplications of a multiprocessor in a microsecond."""

BYTES_A_US = 1.1e4
"""Its share of the memory rate."""

SUM_US = 3.0
"""What the kernel that adds the parts costs, with the gap between two kernels."""

SPLIT_GAIN = 0.9
"""Share of the unsplit time that splitting has to come down to, so that a wrong reckoning costs little."""

MOST_SPLITS = 16

SPLIT_STEP, GROUPED_SPLIT_STEP = 128, 512
"""Columns that all blocks but the last of a tile take a multiple of: a K step of four slices."""


@dataclass(frozen=True)
class Tile:
    """A tile of the matrix kernels (csrc/linear/gemm.cu).

    m, n    outputs of a block
    blocks  that fit a multiprocessor
    full    share of the card's dp4a rate with all of them resident
    sparse  the same with fewer
    may_split  whether csrc/linear/gemm_split.cu has it
    """

    m: int
    n: int
    blocks: int
    full: float
    sparse: float
    may_split: bool = True

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}"


TILES = {
    False: (  # one scale a row
        Tile(128, 128, blocks=2, full=0.95, sparse=0.80, may_split=False),  # 95 % at 2048x14336x4096
        Tile(64, 64, blocks=2, full=0.93, sparse=0.85),  # 91 % at 512x4096x14336, 77 % at 128x4096x4096
        Tile(32, 32, blocks=4, full=0.85, sparse=0.70),  # 80 % at 64x14336x4096
        Tile(16, 64, blocks=4, full=0.70, sparse=0.60),  # 58 % at 16x14336x4096
    ),
    True: (  # a scale for every 128 columns
        Tile(128, 128, blocks=1, full=0.82, sparse=0.82, may_split=False),  # 82 % at 2048x14336x4096
        Tile(64, 64, blocks=1, full=0.75, sparse=0.75),  # 71 % at 256 rows
        Tile(32, 64, blocks=2, full=0.60, sparse=0.50),  # 60 % at 64 rows, 46 % at 32
    ),
}
"""Tiles by whether scales are grouped, the larger first: of equals the first is taken."""


@dataclass(frozen=True)
class Plan:
    """How a product is computed.

    tile     name of the tile
    k_split  columns of K that a block sums, several blocks sharing a tile then (csrc/linear/gemm_split.cu); None: all
    """

    tile: str
    k_split: int | None = None


@functools.lru_cache(1 << 14)
def plan_for(m: int, n: int, k: int, grouped: bool, units: int, may_split: bool = True) -> Plan:
    """The plan with which an m x n x k product takes the least time on a card of `units` multiprocessors.

    Each multiprocessor works through its share of the blocks at the tile's rate. may_split is false where rows do not
    start on 16 bytes, which the split kernels want.
    """
    whole = {Plan(tile.name): _time_us(tile, m, n, k, k, units) for tile in TILES[grouped]}
    best = min(whole, key=whole.get)
    step = GROUPED_SPLIT_STEP if grouped else SPLIT_STEP
    parts = {math.ceil(k / splits / step) * step for splits in range(2, MOST_SPLITS + 1)} if may_split else ()
    split = {
        Plan(tile.name, k_split): _time_us(tile, m, n, k, k_split, units)
        for tile in TILES[grouped]
        for k_split in sorted(parts, reverse=True)
        if tile.may_split and k_split < k
    }
    best_split = min(split, key=split.get, default=None)
    return best_split if best_split and split[best_split] < SPLIT_GAIN * whole[best] else best


def _time_us(tile: Tile, m: int, n: int, k: int, k_split: int, units: int) -> float:
    splits = math.ceil(k / k_split)
    share = math.ceil(math.ceil(m / tile.m) * math.ceil(n / tile.n) * splits / units)
    rate = tile.full if share >= tile.blocks else tile.sparse
    product = share * tile.m * tile.n * k_split / (rate * MACS_A_US)
    if splits == 1:
        return product
    return product + SUM_US + 2 * 4 * splits * m * n / (units * BYTES_A_US)  # partial sums are written and read


def k_warps_for(n: int, k: int, units: int, rows: int = 1) -> int:
    """Warps that share the columns of a weight row in the streaming kernel: as few as fill the card.

    n, k   of the weights
    units  multiprocessors of the card
    rows   how often weights are streamed side by side (routed rows; all rows of one product count as one)
    """
    wanted = GEMV_WARPS_AN_SM * units
    warps = math.ceil(n / GEMV_ROWS_A_WARP) * rows
    split = 1
    while split < 8 and warps * split < wanted and split * GEMV_STEP < k:
        split *= 2
    return split


def moe_tile_for(rows: int, num_experts: int, grouped: bool) -> Tile | None:
    """Tile for `rows` routed rows, or None where weights are better streamed once a row."""
    an_expert = rows / num_experts
    if an_expert < MOE_ROWS_AN_EXPERT:
        return None
    sizes = {tile.name: tile for tile in TILES[grouped]}
    small = "32x64" if grouped else "32x32"
    return sizes["64x64" if an_expert > 32 else small]  # a tile holds rows of one expert only
