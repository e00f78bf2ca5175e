# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel takes a W8A8 product: the one table that the ops ask.

The numbers come from the prototype of these kernels on an NVIDIA H200 (132 SMs, compute_70 PTX, cold weights). The
choice does not reach the result where there is one scale a row; with group scales the order of a sum follows it.
"""

import math
from dataclasses import dataclass

GEMV_MOST_ROWS = 8
"""Rows of x up to which weights are streamed (14336x4096: 87 % of memory rate at m = 1, 73 % at 8). Beyond it a tile of
16 rows is as fast."""

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


@dataclass(frozen=True)
class Tile:
    """A tile of the matrix kernels (csrc/linear/gemm.cu).

    m, n    outputs of a block
    blocks  that fit a multiprocessor
    full    share of the card's dp4a rate with all of them resident
    sparse  the same with fewer
    """

    m: int
    n: int
    blocks: int
    full: float
    sparse: float

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}"


TILES = {
    False: (  # one scale a row
        Tile(128, 128, blocks=2, full=0.95, sparse=0.80),  # 95 % at 2048x14336x4096
        Tile(64, 64, blocks=2, full=0.93, sparse=0.85),  # 91 % at 512x4096x14336, 77 % at 128x4096x4096
        Tile(32, 32, blocks=4, full=0.85, sparse=0.70),  # 80 % at 64x14336x4096
        Tile(16, 64, blocks=4, full=0.70, sparse=0.60),  # 58 % at 16x14336x4096
    ),
    True: (  # a scale for every 128 columns
        Tile(128, 128, blocks=1, full=0.82, sparse=0.82),  # 82 % at 2048x14336x4096
        Tile(64, 64, blocks=1, full=0.75, sparse=0.75),  # 71 % at 256 rows
        Tile(32, 64, blocks=2, full=0.60, sparse=0.50),  # 60 % at 64 rows, 46 % at 32
    ),
}
"""Tiles by whether scales are grouped, the larger first: of equals the first is taken."""


BLOCK_TILES = (
    Tile(64, 64, blocks=1, full=0.70, sparse=0.70),
    Tile(32, 64, blocks=2, full=0.60, sparse=0.50),
)
"""Tiles of weights in blocks (csrc/linear/block_gemm.cu). Reckoned from those with grouped scales, not measured."""


def tile_for(m: int, n: int, grouped: bool, units: int) -> str:
    """Name of the tile with which m x n outputs take the least time on a card of `units` multiprocessors.

    Each works through its share of the tiles at the tile's rate.
    """
    return _fastest(TILES[grouped], m, n, units)


def block_tile_for(m: int, n: int, units: int) -> str:
    """The same for weights in blocks."""
    return _fastest(BLOCK_TILES, m, n, units)


def _fastest(tiles: tuple[Tile, ...], m: int, n: int, units: int) -> str:
    def time(tile: Tile) -> float:
        share = math.ceil(math.ceil(m / tile.m) * math.ceil(n / tile.n) / units)
        return share * tile.m * tile.n / (tile.full if share >= tile.blocks else tile.sparse)

    return min(tiles, key=time).name


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
    sizes = {tile.name: tile for tile in TILES[grouped]}
    small = "32x64" if grouped else "32x32"
    return sizes["64x64" if an_expert > 32 else small]  # a tile holds rows of one expert only
