# SPDX-License-Identifier: BSD-3-Clause
"""How fast the W8A8 kernels are on a card: shipped numbers, and those that ``superl8 tune`` measured on it.

ops/linear.py reckons with them. A card's own are read once, from a file of the user's cache that names card and driver
and is not used for other kernels than those it was measured with.
"""

import json
import logging
import math
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from vllm_superl8 import device as machine
from vllm_superl8.ops import registry

logger = logging.getLogger(__name__)

FOLDER = Path.home() / ".cache" / "superl8" / "tuning"


@dataclass(frozen=True)
class Tile:
    """A tile of the matrix kernels (csrc/linear/gemm.cu).

    m, n       outputs of a block
    blocks     that fit a multiprocessor
    full       share of the card's dp4a rate with all of them resident
    sparse     the same with fewer
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


@dataclass(frozen=True, eq=False)
class Tuning:
    """Rates are those of one multiprocessor.

    per_row, grouped  tiles for one scale a row, and for one every 128 columns, the larger first
    macs_a_us         dp4a multiplications in a microsecond
    bytes_a_us        bytes of device memory in a microsecond
    sum_us            what adding the parts of a split product costs beside its traffic
    gemv_most_rows    rows of x up to which weights are streamed, at most 8
    fp16_macs_a_us    multiplications of torch's fp16 matrix product; None: not measured, and never taken
    """

    per_row: tuple[Tile, ...]
    grouped: tuple[Tile, ...]
    macs_a_us: float
    bytes_a_us: float
    sum_us: float
    gemv_most_rows: int
    fp16_macs_a_us: float | None = None

    def tiles(self, grouped: bool) -> tuple[Tile, ...]:
        return self.grouped if grouped else self.per_row


# Tiles: the prototype of these kernels on an NVIDIA H200 (132 SMs, compute_70 PTX, cold weights).
# The other rates: a V100's 80 multiprocessors at 63 dp4a TOPS and 900 GB/s; sum_us is a guess.
SHIPPED = Tuning(
    per_row=(
        Tile(128, 128, blocks=2, full=0.95, sparse=0.80, may_split=False),  # 95 % at 2048x14336x4096
        Tile(64, 64, blocks=2, full=0.93, sparse=0.85),  # 91 % at 512x4096x14336, 77 % at 128x4096x4096
        Tile(32, 32, blocks=4, full=0.85, sparse=0.70),  # 80 % at 64x14336x4096
        Tile(16, 64, blocks=4, full=0.70, sparse=0.60),  # 58 % at 16x14336x4096
    ),
    grouped=(
        Tile(128, 128, blocks=1, full=0.82, sparse=0.82, may_split=False),  # 82 % at 2048x14336x4096
        Tile(64, 64, blocks=1, full=0.75, sparse=0.75),  # 71 % at 256 rows
        Tile(32, 64, blocks=2, full=0.60, sparse=0.50),  # 60 % at 64 rows, 46 % at 32
    ),
    macs_a_us=4e5,
    bytes_a_us=1.1e4,
    sum_us=3.0,
    gemv_most_rows=8,  # 14336x4096: 87 % of memory rate at m = 1, 73 % at 8; beyond it a tile of 16 rows is as fast
)

_TILES, _RATES = ("per_row", "grouped"), ("macs_a_us", "bytes_a_us", "sum_us")


def path_of(card: str, driver: str, folder: Path = FOLDER) -> Path:
    """File of a card, by its name, and driver version."""
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{card}-{driver}").strip("-") + ".json")


def save(tuning: Tuning, card: str, driver: str, kernels: str, folder: Path = FOLDER) -> Path:
    """Write what was measured with the kernels of source hash `kernels`; returns the path."""
    path = path_of(card, driver, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps({"card": card, "driver": driver, "kernels": kernels, **asdict(tuning)}, indent=1) + "\n"
    )
    partial.replace(path)
    return path


def load(card: str, driver: str, kernels: str, folder: Path = FOLDER) -> Tuning:
    """The card's own numbers, or the shipped ones, with a line in the log where a file is not used."""
    path = path_of(card, driver, folder)
    if not path.exists():
        return SHIPPED
    try:
        found = json.loads(path.read_text())
        tuning = _parsed(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(
            "superl8: %s is not used (%s: %s); superl8 tune writes it anew", path, type(error).__name__, error
        )
        return SHIPPED
    if found.get("kernels") != kernels:
        logger.warning("superl8: %s was measured with other kernels and is not used; run superl8 tune again", path)
        return SHIPPED
    logger.info("superl8: matrix products are planned with %s", path)
    return tuning


def _parsed(found: dict) -> Tuning:
    """Raises ValueError for numbers that no card has; sizes of tiles are those of the kernels, not of the file."""
    changes = {name: _positive(name, found[name]) for name in _RATES}
    for name in _TILES:
        own = {(tile["m"], tile["n"]): tile for tile in found[name]}
        changes[name] = tuple(
            replace(tile, **{rate: _positive(rate, own[tile.m, tile.n][rate]) for rate in ("full", "sparse")})
            for tile in getattr(SHIPPED, name)
        )
    rows, fp16 = found["gemv_most_rows"], found["fp16_macs_a_us"]
    if not isinstance(rows, int) or not 1 <= rows <= 8:
        raise ValueError(f"gemv_most_rows is {rows!r}, wanted 1 to 8")
    fp16 = None if fp16 is None else _positive("fp16_macs_a_us", fp16)
    return replace(SHIPPED, **changes, gemv_most_rows=rows, fp16_macs_a_us=fp16)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}, wanted a number above 0")
    return float(value)


@cache
def tuning_for(device: torch.device) -> Tuning:
    """The numbers for a device that holds tensors; for the CPU (emulator) the shipped ones."""
    if device.type != "cuda" or registry.COMPILED is None:
        return SHIPPED
    kernels = registry.COMPILED.build_info()["source_hash"]
    return load(torch.cuda.get_device_name(device), machine.driver_version(), kernels)
