# SPDX-License-Identifier: BSD-3-Clause
"""The reference codec of KV pages: bytes against the layout written out by hand."""

import pytest
import torch

from vllm_superl8.formats import int8, kv
from vllm_superl8.formats.layout import KV_LAYOUTS

FORMATS = sorted({row.name for row in KV_LAYOUTS.values()})


def make_cache(kv_format, pages=3, heads=2, page_size=16, head_dim=8):
    dtype = kv.STORAGE[kv_format]
    content = KV_LAYOUTS[kv_format].token_bytes(head_dim) // dtype.itemsize
    raw = torch.full((pages, heads, page_size * content * dtype.itemsize), 255, dtype=torch.uint8)
    return raw.view(dtype).view(pages, heads, page_size, content), raw


def rows(tokens=4, heads=2, head_dim=8, seed=0):
    x = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)) + 1
    return x * torch.arange(1, head_dim + 1)


def test_every_format_has_a_storage_type():
    assert sorted(kv.STORAGE) == FORMATS


@pytest.mark.parametrize("kv_format", FORMATS)
def test_encode_puts_bytes_where_the_layout_says(kv_format):
    cache, raw = make_cache(kv_format)
    key, value = rows(), rows(seed=1)
    slots = torch.tensor([0, 17, -1, 47])
    kv.encode(cache, key, value, slots)
    expected = torch.full_like(raw, 255)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, 16)
        for head in range(2):
            for plane, source in enumerate((key, value)):
                row = source[token, head]
                if kv_format == "int8":
                    codes, scale = int8.quantize(row, -1)
                    at = 2 * 16 * 8 + (plane * 16 + offset) * 4
                    expected[page, head, at : at + 4] = scale.view(torch.uint8)
                else:
                    codes = row.to(kv.STORAGE[kv_format])
                stored = codes.view(torch.uint8)
                at = (plane * 16 + offset) * stored.numel()
                expected[page, head, at : at + stored.numel()] = stored
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_gives_back_what_was_stored(kv_format):
    cache, _ = make_cache(kv_format)
    key, value = rows(32), rows(32, seed=1)
    kv.encode(cache, key, value, torch.arange(16, 48))
    k, v = kv.decode(cache, torch.tensor([2, 1]), 8)
    assert k.dtype == v.dtype == torch.float32
    for got, source in ((k, key), (v, value)):
        want = torch.cat([source[16:], source[:16]]).transpose(0, 1)
        if kv_format == "int8":
            want = int8.dequantize(*int8.quantize(want, -1))
        assert torch.equal(got, want.to(kv.STORAGE[kv_format] if kv_format != "int8" else torch.float32).float())


def test_int8_pages_hold_nearly_twice_the_tokens_of_16_bit():
    assert [KV_LAYOUTS["int8"].token_bytes(d) for d in (64, 128, 256)] == [136, 264, 520]
    assert KV_LAYOUTS["fp16"].token_bytes(128) == 512


def test_layout_of_follows_the_dtype_for_auto_and_knows_aliases():
    assert kv.layout_of(make_cache("bf16")[0], "auto", 8).name == "bf16"
    assert kv.layout_of(make_cache("fp16")[0], "float16", 8).name == "fp16"
    assert kv.layout_of(make_cache("int8")[0], "int8_per_token_head", 8).name == "int8"


@pytest.mark.parametrize(
    ("stored", "asked", "head_dim", "message"),
    [
        ("int8", "auto", 8, r"torch\.int8 with format 'auto': wanted auto for floating point, or one of bf16"),
        ("fp16", "k3", 8, "format 'k3': wanted"),
        ("fp16", "bf16", 8, r"format 'bf16' is torch\.float16, wanted torch\.bfloat16"),
        ("fp16", "int8", 8, r"format 'int8' is torch\.float16, wanted torch\.int8"),
        ("int8", "int8", 16, r"wanted \(pages, KV heads, page_size, 40\) for a head_dim of 16"),
    ],
)
def test_layout_of_refuses_a_cache_that_does_not_fit(stored, asked, head_dim, message):
    with pytest.raises(ValueError, match=message):
        kv.layout_of(make_cache(stored)[0], asked, head_dim)


def test_planes_refuse_pages_that_are_not_contiguous():
    cache = make_cache("fp16")[0]
    with pytest.raises(ValueError, match="a page of one head must be contiguous"):
        kv.planes(cache.transpose(1, 2).contiguous().transpose(1, 2), 8)
