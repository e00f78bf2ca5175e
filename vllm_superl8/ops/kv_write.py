# SPDX-License-Identifier: BSD-3-Clause
"""Writes new keys and values into the paged cache (formats: formats.kv)."""

import torch

from vllm_superl8.formats import kv
from vllm_superl8.ops.registry import dtype_name, ptr, register, stream


def _check(key, value, kv_cache, kv_format):
    quantized = kv_cache.dtype == torch.int8
    if kv_format not in ("auto", "int8") or quantized != (kv_format == "int8"):
        raise ValueError(f"kv_cache_write: kv_format {kv_format!r} does not fit a cache of {kv_cache.dtype}")
    if key.shape != value.shape:
        raise ValueError(f"kv_cache_write: key is {tuple(key.shape)}, value {tuple(value.shape)}")
    if not quantized and kv_cache.dtype != key.dtype:
        raise ValueError(f"kv_cache_write: a cache of {kv_cache.dtype} does not take {key.dtype}")
    content = 2 * key.shape[-1] + (8 if quantized else 0)
    if kv_cache.shape[3] != content:
        raise ValueError(f"kv_cache_write: {kv_cache.shape[3]} elements a token, wanted {content}")


def kv_cache_write_reference(key, value, kv_cache, slot_mapping, kv_format):
    _check(key, value, kv_cache, kv_format)
    tokens = slot_mapping.numel()
    kv.write(kv_cache, key[:tokens], value[:tokens], slot_mapping)


def kv_cache_write_fake(key, value, kv_cache, slot_mapping, kv_format):
    return None


def kv_cache_write_kernel(module, key, value, kv_cache, slot_mapping, kv_format):
    _check(key, value, kv_cache, kv_format)
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("kv_cache_write: the last dimension of key and value must be contiguous")
    size = kv_cache.element_size()
    module.kv_write(
        kv_format, dtype_name(key, "kv_cache_write"), ptr(key), ptr(value), ptr(kv_cache), ptr(slot_mapping),
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
"""kv_cache[slot] = key, value for each token; an int8 cache quantises them, kernel and reference bit for bit.

key, value    (tokens, num_kv_heads, head_dim) float16, bfloat16 or float32, last dimension contiguous
kv_cache      (num_pages, num_kv_heads, page_size, content), see formats.kv
slot_mapping  (<= tokens) int64, page * page_size + offset; -1 writes nothing
kv_format     "auto" for a cache of key's dtype, "int8"

Raises ValueError for a cache that does not fit.
"""
