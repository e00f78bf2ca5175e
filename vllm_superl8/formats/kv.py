# SPDX-License-Identifier: BSD-3-Clause
"""Pages of the KV cache: the reference codec of every format in layout.KV_LAYOUTS.

A cache is (num_pages, num_kv_heads, page_size, content) with page_size * content contiguous; content is counted in
elements of its dtype. formats.layout.KVLayout says how the planes lie in there.
"""

import torch

from vllm_superl8.formats import int8
from vllm_superl8.formats.layout import KV_LAYOUTS, KVLayout

STORAGE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
"""Dtype of a cache in each format."""


def layout_of(cache: torch.Tensor, kv_format: str, head_dim: int) -> KVLayout:
    """The format of a cache, given as a name of KV_LAYOUTS or as "auto": floating point, as the cache's dtype says.

    Raises ValueError for an unknown name, and for a cache of another dtype or content.
    """
    by_dtype = {dtype: name for name, dtype in STORAGE.items() if dtype.is_floating_point}
    name = by_dtype.get(cache.dtype) if kv_format == "auto" else kv_format
    if name not in KV_LAYOUTS:
        raise ValueError(
            f"KV cache of {cache.dtype} with format {kv_format!r}: wanted auto for floating point, or one of "
            f"{', '.join(sorted(KV_LAYOUTS))}"
        )
    layout = KV_LAYOUTS[name]
    if cache.dtype != STORAGE[layout.name]:
        raise ValueError(f"KV cache of format {kv_format!r} is {cache.dtype}, wanted {STORAGE[layout.name]}")
    content = layout.token_bytes(head_dim) // cache.element_size()
    if cache.dim() != 4 or cache.shape[3] != content:
        raise ValueError(
            f"KV cache of format {kv_format!r} is {tuple(cache.shape)}, wanted (pages, KV heads, page_size, {content}) "
            f"for a head_dim of {head_dim}"
        )
    return layout


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


def encode(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store key and value (tokens, heads, head_dim) at slots (tokens) int64; negative ones are skipped."""
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


def decode(cache: torch.Tensor, pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the pages numbered in `pages` (n) int64, as float32: (heads, n * page_size, head_dim) each."""
    views = [view.transpose(0, 1)[:, pages].flatten(1, 2) for view in planes(cache, head_dim)]
    k, v = views[0].float(), views[1].float()
    if cache.dtype == torch.int8:
        k, v = k * views[2].unsqueeze(-1), v * views[3].unsqueeze(-1)
    return k, v
