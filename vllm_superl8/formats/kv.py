# SPDX-License-Identifier: BSD-3-Clause
"""Pages of the KV cache: the reference codec of every format in layout.KV_LAYOUTS.

A cache is (num_pages, num_kv_heads, page_size, content) with page_size * content contiguous; content is counted in
elements of its dtype. formats.layout.KVLayout says how the planes lie in there.
"""

import torch

from vllm_superl8.formats import int8


def planes(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Views of a cache's planes: K and V codes (pages, heads, page_size, head_dim), and for int8 the K and V scales
    (pages, heads, page_size) float32.

    Raises ValueError if a page of one head is not contiguous.
    """
    pages, heads, page_size, content = cache.shape
    if cache.stride(3) != 1 or cache.stride(2) != content:
        raise ValueError(f"KV cache with strides {cache.stride()}: a page of one head must be contiguous")
    flat = cache.as_strided((pages, heads, page_size * content), (cache.stride(0), cache.stride(1), 1))
    codes = page_size * head_dim
    k = flat[..., :codes].unflatten(-1, (page_size, head_dim))
    v = flat[..., codes : 2 * codes].unflatten(-1, (page_size, head_dim))
    if cache.dtype != torch.int8:
        return k, v
    scales = flat[..., 2 * codes :]
    if scales.storage_offset() % 4 or any(stride % 4 for stride in scales.stride()[:2]):
        raise ValueError(f"KV cache with strides {cache.stride()}: scales must be 4-byte aligned")
    scales = scales.view(torch.float32)
    return k, v, scales[..., :page_size], scales[..., page_size : 2 * page_size]


def write(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store key and value (tokens, heads, head_dim) at slots (tokens) int64; -1 is skipped."""
    page_size = cache.shape[2]
    live = slots >= 0
    slots, key, value = slots[live], key[live], value[live]
    page, offset = slots // page_size, slots % page_size
    views = planes(cache, key.shape[-1])
    if cache.dtype == torch.int8:
        for codes_plane, scale_plane, rows in ((views[0], views[2], key), (views[1], views[3], value)):
            codes, scales = int8.quantize(rows, -1)
            codes_plane[page, :, offset] = codes
            scale_plane[page, :, offset] = scales.squeeze(-1)
    else:
        views[0][page, :, offset] = key.to(cache.dtype)
        views[1][page, :, offset] = value.to(cache.dtype)


def gather(cache: torch.Tensor, pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some pages, decoded to float32: (heads, len(pages) * page_size, head_dim) each."""
    views = [view[pages] for view in planes(cache, head_dim)]
    k, v = views[0].float(), views[1].float()
    if cache.dtype == torch.int8:
        k, v = k * views[2].unsqueeze(-1), v * views[3].unsqueeze(-1)
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)
