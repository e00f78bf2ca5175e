# SPDX-License-Identifier: BSD-3-Clause
"""Which of our formats a stored matrix becomes: a function of its scheme, the layer's K and the user's options."""

from vllm.logger import init_logger

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.quant.options import ACTIVATIONS, GROUP_SIZE, Options

logger = init_logger(__name__)


def group_size(parts: list[Matrix], k: int, options: Options, name: str) -> int:
    """Columns that share an int8 scale in a layer made of `parts`: -1 for the row, else 128.

    k     columns of the layer on this rank
    name  of the layer, for the log

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
