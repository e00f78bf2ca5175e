# SPDX-License-Identifier: BSD-3-Clause
"""Which of our formats a stored matrix becomes: a function of its scheme, the layer's K and the user's options."""

from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.formats import int4
from vllm_superl8.quant.options import ACTIVATIONS, GROUP_SIZE, INT4_GROUP_SIZE, Options

logger = init_logger(__name__)


@dataclass(frozen=True)
class Target:
    """What a matrix is converted to.

    format       "int8", "int4" or "int4_zero" (formats.layout)
    group_size   columns that share a scale; -1: the row (int8 only)
    ordered      columns are sorted into groups, and the layer gathers its activations in the same order
    scale_dtype  of int4 scales; those of int8 are float32
    """

    format: str
    group_size: int
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        groups = "one scale a row" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"{'int8' if self.format == 'int8' else 'int4'}, {groups}"


def choose(parts: list[Matrix], k: int, sharded: bool, options: Options, name: str) -> Target:
    """The format of a linear layer made of `parts`.

    k        columns of the layer on this rank
    sharded  whether other ranks have other columns
    name     of the layer, for the log

    Codes of up to 4 bits stay in 4, everything else becomes int8, unless option weight_bits says otherwise.
    """
    stored = all(0 < part.bits <= 4 for part in parts)
    if (options.weight_bits or (4 if stored else 8)) == 4:
        size = int4_group_size(min(map(_int4_group, parts)) if stored else INT4_GROUP_SIZE, k)
        ordered = any(part.ordered for part in parts)
        if size is None:
            logger.warning("superl8: %s has int8 weights, its K of %d is not a multiple of 32", name, k)
        elif stored and ordered and sharded:
            logger.warning_once("superl8: layers whose activation order reaches across ranks have int8 weights")
            logger.debug("superl8: %s has int8 weights", name)
        else:
            zeros = not stored or any(part.zeros for part in parts)
            wide = stored and not all(part.half_scales for part in parts)
            return Target(
                "int4_zero" if zeros else "int4", size, ordered and stored, torch.float32 if wide else torch.float16
            )
    return Target("int8", int8_group_size(parts, k, options, name))


def _int4_group(part: Matrix) -> int:
    """The largest group of the int4 format of which the part's groups are whole numbers, else the smallest."""
    whole = [size for size in int4.GROUP_SIZES if part.group_size == -1 or part.group_size % size == 0]
    return max(whole, default=min(int4.GROUP_SIZES))


def int4_group_size(wanted: int, k: int) -> int | None:
    """The largest group size, up to the wanted one, that divides k; None if none does."""
    return max((size for size in int4.GROUP_SIZES if size <= wanted and k % size == 0), default=None)


def int8_group_size(parts: list[Matrix], k: int, options: Options, name: str) -> int:
    """Columns that share an int8 scale in a layer made of `parts`: -1 for the row, else 128.

    Option activation "auto" follows the checkpoint: groups of any size become groups of 128, rows stay rows.
    """
    if options.activation == "auto":
        wanted = -1 if all(part.group_size == -1 for part in parts) else GROUP_SIZE
    else:
        wanted = ACTIVATIONS[options.activation]
    if wanted == -1 or k % wanted == 0:
        return wanted
    logger.warning("superl8: %s has one scale a row, its K of %d is not a multiple of %d", name, k, wanted)
    return -1
