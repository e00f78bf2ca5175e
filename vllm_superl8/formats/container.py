# SPDX-License-Identifier: BSD-3-Clause
"""What the bytes of a ``.superl8`` file mean: magic numbers, dtypes, and for each scheme the shape of codes and scales.

``checkpoint.superl8_header`` reads files by this table and ``checkpoint.superl8_writer`` writes them.

    header-front  FNI8QCK1, u64 header length > 0, JSON header, zeros to a multiple of 128, blobs
    footer        FNI8QCK1, u64 0, zeros to byte 128, blobs, JSON header, u64 header offset, u64 its length, FNI8FOOT

Numbers are little-endian. Offsets of blobs count from the first byte of the blob area and are multiples of 128.
"""

from dataclasses import dataclass

import torch

MAGIC = b"FNI8QCK1"
FOOTER_MAGIC = b"FNI8FOOT"
ALIGN = 128
FOOTER_BYTES = 24
"""u64 header offset in the file, u64 header length, FNI8FOOT."""

SUFFIX = ".superl8"

FIXED = {"version": 1, "kernel_abi_version": 1, "layout": "cuda-dp4a", "align": ALIGN}
"""Header keys that say how to read the rest; a file with other values is another format."""

DESCRIPTION = {"arch": "sm70", "quant": "dp4a_w8a8"}
"""Header keys that are written as they always were and decide nothing: each tensor names its scheme."""

META = "__meta__"
FILES = "files"
"""Key of ``__meta__`` for tokenizer and configuration files, name to a row like a tensor's (uint8, raw). These rows are
not among the tensors, so that a reader which hands all tensors to a model never meets them."""

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Scheme:
    """How a matrix (out, in) is stored.

    dtype      of the codes, None: any
    scaled     it has a paired float32 blob of scales
    grouped    one scale a row and group of columns (out, in / group_size, rounded up), else one a row (out)
    codebooks  values that the key codebook may have, None: anything
    """

    dtype: str | None
    scaled: bool
    grouped: bool = False
    codebooks: tuple[str | None, ...] | None = None
    doc: str = ""


SCHEMES = {
    "per_row_i8": Scheme("int8", True, doc="int8 codes in [-127, 127], a scale a row"),
    "per_chan_i8": Scheme("int8", True, doc="as per_row_i8"),
    "per_group_i8": Scheme("int8", True, grouped=True, doc="int8 codes, a scale a row and group; new in this package"),
    "per_group_i4": Scheme(
        "uint8",
        True,
        grouped=True,
        codebooks=("int4", "nf4"),
        doc="two codes a byte, the even column in the low nibble",
    ),
    "per_group_w3a8": Scheme("int32", True, grouped=True, doc="3-bit codes as bit planes, three words for 32 columns"),
    "gguf_kquant": Scheme("uint8", False, doc="blocks of a GGUF type, named by codebook"),
    "raw": Scheme(None, False, doc="values as they are"),
}

ROW_SCALED = tuple(name for name, scheme in SCHEMES.items() if scheme.dtype == "int8" and not scheme.grouped)
INT8 = (*ROW_SCALED, "per_group_i8")


def columns(scheme: str, stored: int) -> int:
    """Columns of the matrix whose codes have rows of `stored` elements; gguf_kquant rows are counted in bytes."""
    return {"per_group_i4": 2 * stored, "per_group_w3a8": stored // 3 * 32}.get(scheme, stored)
