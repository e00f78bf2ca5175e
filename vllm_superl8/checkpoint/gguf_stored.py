# SPDX-License-Identifier: BSD-3-Clause
"""A matrix of a GGUF file that is still in its blocks for layers that take it so, a plain tensor for all others."""

import torch
from torch.utils._pytree import tree_map_only

from vllm_superl8.checkpoint.gguf_tensors import decode
from vllm_superl8.formats.layout import Layout

_aten = torch.ops.aten


class StoredMatrix(torch.Tensor):
    """(n, k) weights in `dtype` by their looks; inside, the rows of the file.

    blocks  (n, bytes) uint8, as in the file
    format  row of formats.layout that holds this GGUF type

    Slices of rows stay in blocks. Every other operation decodes the matrix first and gives a plain tensor, so that
    models and layers that know nothing of this class load what they expect.
    """

    blocks: torch.Tensor
    format: Layout

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, blocks: torch.Tensor, layout: Layout, dtype: torch.dtype):
        shape = (blocks.shape[0], blocks.shape[1] // layout.bytes * layout.values)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        self.blocks, self.format = blocks, layout
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func is _aten.detach.default or func is _aten.alias.default:
                return first.with_blocks(first.blocks)
            if func is _aten.slice.Tensor and (len(args) < 2 or args[1] in (0, -2)):
                return first.with_blocks(func(first.blocks, *args[1:], **kwargs))
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs))
        return func(*args, **kwargs)

    def with_blocks(self, blocks: torch.Tensor) -> "StoredMatrix":
        """The matrix with other rows of the same type."""
        return StoredMatrix(blocks, self.format, self.dtype)

    def columns(self, start: int, size: int) -> "StoredMatrix":
        """Columns [start, start + size). Raises ValueError where that would cut a block."""
        values, block_bytes = self.format.values, self.format.bytes
        if start % values or size % values:
            raise ValueError(
                f"{size} of {self.shape[1]} columns from {start} on: {self.format.ggml} has blocks of {values} columns "
                "that cannot be cut; take a smaller --tensor-parallel-size, or a file in another quantisation"
            )
        first, last = start // values * block_bytes, (start + size) // values * block_bytes
        return self.with_blocks(self.blocks[:, first:last])

    def values(self) -> torch.Tensor:
        """Plain tensor (n, k) in dtype."""
        return decode(self.blocks, self.format.ggml, self.dtype)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"StoredMatrix({tuple(self.shape)}, {self.format.ggml}, {self.dtype})"
