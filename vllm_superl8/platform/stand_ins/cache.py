# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the namespace _C_cache_ops: copies of whole KV pages, for offloading."""

import ctypes

import torch

from vllm_superl8.ops import registry
from vllm_superl8.platform.stand_ins import library


def define(device: str) -> None:
    """Define what vLLM calls on "cpu" or "cuda"."""
    library.define(
        "_C_cache_ops",
        "swap_blocks(Tensor source, Tensor(a!) target, int block_bytes, Tensor mapping) -> ()",
        _swap_blocks,
    )
    copy = _copy_on_host if device == "cpu" else _copy_on_stream

    def swap_blocks_batch(source_addresses, target_addresses, sizes, is_src_access_order_any=False):
        rows = zip(source_addresses.tolist(), target_addresses.tolist(), sizes.tolist(), strict=True)
        for source, target, size in rows:
            copy(source, target, size)

    library.define(
        "_C_cache_ops",
        "swap_blocks_batch(Tensor source_addresses, Tensor target_addresses, Tensor sizes, bool "
        "is_src_access_order_any=False) -> ()",
        swap_blocks_batch,
    )


def _swap_blocks(source, target, block_bytes, mapping):
    """Copy blocks of block_bytes; mapping (n, 2) int64 on the CPU holds source and target numbers."""
    from_blocks = _bytes(source).view(-1, block_bytes)
    to_blocks = _bytes(target).view(-1, block_bytes)
    for source_block, target_block in mapping.tolist():
        to_blocks[target_block].copy_(from_blocks[source_block], non_blocking=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _copy_on_host(source: int, target: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _copy_on_stream(source: int, target: int, size: int) -> None:
    if registry.COMPILED is None:
        raise RuntimeError(f"swap_blocks_batch needs the compiled module: {registry.NO_KERNELS_REASON}")
    registry.COMPILED.copy_async(target, source, size, torch.cuda.current_stream().cuda_stream)
