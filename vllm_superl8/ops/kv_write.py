# SPDX-License-Identifier: BSD-3-Clause
"""Writes new keys and values into the paged cache (formats: formats.kv)."""

import torch

from vllm_superl8.formats import kv
from vllm_superl8.formats.layout import KVLayout
from vllm_superl8.ops.registry import dtype_name, ptr, register, stream


def _check(key, value, kv_cache, slot_mapping, kv_format) -> KVLayout:
    if key.dim() != 3 or key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"kv_cache_write: key is {tuple(key.shape)} {key.dtype}, value {tuple(value.shape)} {value.dtype}"
        )
    if slot_mapping.numel() > key.shape[0]:
        raise ValueError(f"kv_cache_write: {slot_mapping.numel()} slots for {key.shape[0]} tokens")
    layout = kv.layout_of(kv_cache, kv_format, key.shape[2])
    if kv_cache.shape[1] != key.shape[1]:
        raise ValueError(f"kv_cache_write: key has {key.shape[1]} KV heads, the cache {kv_cache.shape[1]}")
    return layout


def kv_cache_write_reference(key, value, kv_cache, slot_mapping, kv_format):
    layout = _check(key, value, kv_cache, slot_mapping, kv_format)
    tokens = slot_mapping.numel()
    kv.encode(kv_cache, layout, key[:tokens], value[:tokens], slot_mapping.reshape(-1))


def kv_cache_write_fake(key, value, kv_cache, slot_mapping, kv_format):
    return None


def kv_cache_write_kernel(module, key, value, kv_cache, slot_mapping, kv_format):
    layout = _check(key, value, kv_cache, slot_mapping, kv_format)
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("kv_cache_write: the last dimension of key and value must be contiguous")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"kv_cache_write: slot_mapping must be contiguous int64, got {slot_mapping.dtype}")
    size = kv_cache.element_size()
    module.kv_write(
        layout.name, dtype_name(key, "kv_cache_write"), ptr(key), ptr(value), ptr(kv_cache), ptr(slot_mapping),
        slot_mapping.numel(), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_cache.stride(0) * size, kv_cache.stride(1) * size, key.shape[1], key.shape[2], kv_cache.shape[2],
        stream(key),
    )  # fmt: skip


kv_cache_write = register(
    "kv_cache_write",
    "(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_format) -> ()",
    reference=kv_cache_write_reference,
    fake=kv_cache_write_fake,
    kernel=kv_cache_write_kernel,
)
"""kv_cache[slot] = key, value for each token, in the cache's format; kernel and reference agree bit for bit.

key, value    (tokens, num_kv_heads, head_dim) float16, bfloat16 or float32, last dimension contiguous; for the kernel
              head_dim is a multiple of 8, at most 256
kv_cache      (num_pages, num_kv_heads, page_size, content), see formats.kv; page_size a multiple of 16
slot_mapping  (<= tokens) int64, page * page_size + offset; a negative one writes nothing
kv_format     "auto" for a floating-point cache, or a name of formats.layout.KV_LAYOUTS

Raises ValueError for a cache that does not fit.
"""
