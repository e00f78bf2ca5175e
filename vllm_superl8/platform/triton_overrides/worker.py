# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM's worker does by Triton kernels around a step: slots of new tokens, clearing pages, moving states."""

import ctypes
import logging
from functools import cache

import torch

from vllm_superl8.ops import registry
from vllm_superl8.platform import driver

logger = logging.getLogger(__name__)


def compute_slot_mapping(
    num_tokens, max_num_tokens, query_start_loc_ptr, positions_ptr, block_table_ptr, block_table_stride,
    slot_mapping_ptr, KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1,
    PAD_ID=-1, BLOCK_SIZE=None,
):  # fmt: skip
    """Slot of each token in the KV cache; PAD_ID for padding and for tokens that other context-parallel ranks keep."""
    positions = positions_ptr[:num_tokens]
    tokens = torch.arange(num_tokens, device=positions.device, dtype=query_start_loc_ptr.dtype)
    requests = torch.searchsorted(query_start_loc_ptr, tokens, right=True) - 1
    requests = requests.clamp(0, block_table_ptr.shape[0] - 1)
    ranks, interleave = TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    block, offset = positions // (KV_CACHE_BLOCK_SIZE * ranks), positions % (KV_CACHE_BLOCK_SIZE * ranks)
    slots = block_table_ptr[requests, block].long() * KV_CACHE_BLOCK_SIZE
    slots += offset // (ranks * interleave) * interleave + offset % interleave
    if ranks > 1:
        slots = torch.where(offset // interleave % ranks == TOTAL_CP_RANK, slots, PAD_ID)
    slot_mapping_ptr[:num_tokens] = slots
    slot_mapping_ptr[num_tokens:max_num_tokens] = PAD_ID


def zero_kv_blocks(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE=None):
    """Clear pages of every segment. Addresses count bytes, strides and sizes 32-bit words."""
    segments = zip(seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True)
    blocks, clear = block_ids_ptr.tolist(), _clear(block_ids_ptr)
    for address, stride, size in segments:
        for block in blocks:
            clear(address + 4 * block * stride, size)


def zero_kv_blocks_cuda(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE=None):
    if registry.COMPILED is None:
        _say_waiting(registry.NO_KERNELS_REASON)
        zero_kv_blocks(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr)
        return
    registry.COMPILED.zero_pages(
        *map(registry.ptr, (seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr)),
        seg_addrs_ptr.numel(), block_ids_ptr.numel(), seg_block_strides_ptr.element_size() == 8,
        registry.stream(block_ids_ptr),
    )  # fmt: skip


def batch_memcpy(src_ptrs, dst_ptrs, sizes, BLOCK_SIZE=None):
    """Copy bytes by address. A target may overlap the end of its source, as where a state moves down."""
    copy = _copy(src_ptrs)
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        copy(source, target, size)


def batch_memcpy_cuda(src_ptrs, dst_ptrs, sizes, BLOCK_SIZE=None):
    if registry.COMPILED is None:
        _say_waiting(registry.NO_KERNELS_REASON)
        batch_memcpy(src_ptrs, dst_ptrs, sizes)
        return
    registry.COMPILED.copy_bytes(
        *map(registry.ptr, (src_ptrs, dst_ptrs, sizes)), src_ptrs.numel(), sizes.element_size() == 8,
        registry.stream(src_ptrs),
    )  # fmt: skip


@cache
def _say_waiting(reason: str) -> None:
    logger.warning("clearing and moving cache pages waits for the GPU: %s", reason)


def _clear(like: torch.Tensor):
    """clear(address, 32-bit words), on the device of `like`."""
    if like.is_cuda:
        stream = registry.stream(like)
        return lambda address, words: driver.clear_async(address, words, stream)
    return lambda address, words: ctypes.memset(address, 0, 4 * words)


def _copy(like: torch.Tensor):
    """copy(source, target, bytes), on the device of `like`."""
    if like.is_cuda:
        stream = registry.stream(like)
        return lambda source, target, size: driver.copy_async(target, source, size, stream)
    return lambda source, target, size: ctypes.memmove(target, source, size)
