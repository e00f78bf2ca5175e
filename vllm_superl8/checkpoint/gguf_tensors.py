# SPDX-License-Identifier: BSD-3-Clause
"""Values of GGUF tensors as torch tensors, one at a time from the mapped file."""

from collections.abc import Iterable

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm_superl8.checkpoint.gguf_header import Tensor

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""Types that hold numbers as they are."""

CHUNK_VALUES = 1 << 24
"""Values decoded at a time: 64 MB of float32 beside the result, whatever the size of the vocabulary."""


def check_types(tensors: Iterable[Tensor]) -> None:
    """Raises ValueError, naming file and tensor, for a type that gguf.quants cannot decode."""
    unknown: set[GGMLQuantizationType] = set()
    known: set[GGMLQuantizationType] = set(PLAIN)
    for tensor in tensors:
        if tensor.type not in known | unknown:
            (known if _decodes(tensor.type) else unknown).add(tensor.type)
        if tensor.type in unknown:
            raise ValueError(
                f"{tensor.path}: tensor {tensor.name} has type {tensor.type.name}, which the installed gguf package "
                "cannot decode; upgrade gguf or take the model in another quantisation"
            )


def _decodes(kind: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read(tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor's values in `dtype`, decoded by ``gguf.quants.dequantize`` where they are quantised."""
    if plain := PLAIN.get(tensor.type):
        return _mapped(tensor).view(plain).view(tensor.shape).to(dtype, copy=True)
    return decode(stored_rows(tensor), tensor.type.name, dtype).view(tensor.shape)


def stored_rows(tensor: Tensor) -> torch.Tensor:
    """The bytes of a quantised tensor, mapped from the file: (rows, bytes a row) uint8."""
    values, block_bytes = GGML_QUANT_SIZES[tensor.type]
    return _mapped(tensor).view(-1, tensor.shape[-1] // values * block_bytes)


def decode(rows: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """rows (n, bytes) uint8 of GGUF type `kind` -> (n, k) in dtype."""
    type = GGMLQuantizationType[kind]
    values, block_bytes = GGML_QUANT_SIZES[type]
    columns = rows.shape[1] // block_bytes * values
    decoded = torch.empty(rows.shape[0], columns, dtype=dtype)
    step = max(1, CHUNK_VALUES // max(1, columns))
    for start in range(0, len(rows), step):
        chunk = np.ascontiguousarray(rows[start : start + step].numpy())
        decoded[start : start + step] = torch.from_numpy(quants.dequantize(chunk, type))
    return decoded


def _mapped(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(np.memmap(tensor.path, np.uint8, mode="c", offset=tensor.offset, shape=(tensor.nbytes,)))
