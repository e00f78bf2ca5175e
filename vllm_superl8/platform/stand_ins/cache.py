# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the namespace _C_cache_ops: copies of whole KV pages, for offloading."""

import ctypes

import torch

from vllm_superl8.platform import driver
from vllm_superl8.platform.stand_ins import library


def define(device: str) -> None:
    """Define what vLLM calls on "cpu" or "cuda"."""
    copy = _copy_on_host if device == "cpu" else _copy_on_stream

    def swap_blocks(source, target, block_bytes, mapping):
        """Copy blocks of block_bytes; mapping (n, 2) int64 on the CPU holds source and target numbers."""
        for source_block, target_block in mapping.tolist():
            from_address = source.data_ptr() + source_block * block_bytes
            copy(from_address, target.data_ptr() + target_block * block_bytes, block_bytes)

    def swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=False):
        """Copy by address; the three are int64 tensors on the CPU. The copies keep the order of the stream."""
        for row in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            copy(*row)

    library.define(
        "_C_cache_ops",
        "swap_blocks(Tensor source, Tensor(a!) target, int block_bytes, Tensor mapping) -> ()",
        swap_blocks,
    )
    library.define(
        "_C_cache_ops",
        "swap_blocks_batch(Tensor sources, Tensor targets, Tensor sizes, bool is_src_access_order_any=False) -> ()",
        swap_blocks_batch,
    )


def _copy_on_host(source: int, target: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _copy_on_stream(source: int, target: int, size: int) -> None:
    driver.copy_async(target, source, size, torch.cuda.current_stream().cuda_stream)
