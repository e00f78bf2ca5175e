# SPDX-License-Identifier: BSD-3-Clause
"""The reference codec of KV pages: bytes against the layout written out by hand."""

import pytest
import torch

from vllm_superl8.formats import kv
from vllm_superl8.formats.layout import KV_LAYOUTS, NF4_LEVELS

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


def int8_row(x, group, scale_dtype):
    """Codes and scales as bytes, from the rule of formats.int8."""
    codes, scales = [], []
    for values in x.split(group):
        scale = (values.abs().max() / 127).to(scale_dtype)
        codes.append((values / scale.float()).round().clamp(-127, 127).to(torch.int8))
        scales.append(scale.view(1))
    return torch.cat(codes).view(torch.uint8), torch.cat(scales).view(torch.uint8)


def nf4_row(x):
    table = torch.tensor(NF4_LEVELS)
    codes, scales = [], []
    for values in x.split(32):
        scales.append(values.abs().max().half().view(1))
        codes += [(table - v / scales[-1].float()).abs().argmin().item() for v in values]
    packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return torch.tensor(packed, dtype=torch.uint8), torch.cat(scales).view(torch.uint8)


def lloyd_row(x):
    """By the published levels; the stream of bits as one number."""
    levels = [-2.152135, -1.343909, -0.756096, -0.245098, 0.245098, 0.756096, 1.343909, 2.152135]
    table = torch.tensor(levels, dtype=torch.float64) * 128**-0.5
    stream, scales = 0, []
    for block, values in enumerate(x.split(128)):
        norm = values.double().norm() * (128 / len(values)) ** 0.5
        scales.append(norm.float().view(1))
        for place, v in enumerate(values.tolist()):
            stream |= (table - v / norm).abs().argmin().item() << 3 * (128 * block + place)
    for place in range(len(x), -(-len(x) // 32) * 32):
        stream |= 3 << 3 * place  # what follows is stored as zeros, which go to the lower of two levels
    return torch.frombuffer(bytearray(stream.to_bytes(-(-len(x) // 32) * 12, "little")), dtype=torch.uint8), torch.cat(
        scales
    ).view(torch.uint8)


def stored_rows(kv_format):
    """How K and V of a row are stored, written out by hand: functions to codes and scales as bytes."""
    if not KV_LAYOUTS[kv_format].quantized:
        return [lambda x: (x.to(kv.STORAGE[kv_format]).view(torch.uint8), torch.empty(0, dtype=torch.uint8))] * 2
    k = {"k8v8_g32": (32, torch.float16), "k8v8_g16": (16, torch.float16)}.get(kv_format, (512, torch.float32))
    v = {"k8v4": nf4_row, "k8v3": lloyd_row}.get(kv_format, lambda x: int8_row(x, 512, torch.float32))
    return [lambda x: int8_row(x, *k), v]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 192])
def test_encode_puts_bytes_where_the_layout_says(head_dim, kv_format):
    cache, raw = make_cache(kv_format, head_dim=head_dim)
    key, value = rows(head_dim=head_dim), rows(head_dim=head_dim, seed=1)
    slots = torch.tensor([0, 17, -1, 47])
    kv.encode(cache, KV_LAYOUTS[kv_format], key, value, slots)
    expected = torch.full_like(raw, 255)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, 16)
        for head in range(2):
            parts = [store(x[token, head]) for store, x in zip(stored_rows(kv_format), (key, value), strict=True)]
            at = 0
            for part in (parts[0][0], parts[1][0], parts[0][1], parts[1][1]):
                size = part.numel()
                expected[page, head, at + offset * size : at + (offset + 1) * size] = part
                at += 16 * size
            assert at == raw.shape[2]
    if kv_format == "k8v3":  # norms may differ in their last bit
        first = 16 * (head_dim + KV_LAYOUTS["k8v3"].v.code_bytes(head_dim) + 4)
        norms, wanted = raw[..., first:].view(torch.float32), expected[..., first:].view(torch.float32)
        assert ((norms - wanted).abs() <= 2e-7 * wanted.abs())[~wanted.isnan()].all()
        assert torch.equal(norms.isnan(), wanted.isnan())
        raw, expected = raw[..., :first], expected[..., :first]
    assert torch.equal(raw, expected)


# Signal to noise of rows after a round trip (dB), at least: normal values with a mean and, but for k8v3, outlier
# channels; K's, or V's where it has fewer bits. Measured: 36.2, 39.5, 41.6, 18.5, 14.7.
SQNR = {"int8": 36.0, "k8v8_g32": 39.0, "k8v8_g16": 41.0, "k8v4": 18.0, "k8v3": 14.5}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [8, 72, 128, 256])
def test_decode_gives_back_what_was_stored(head_dim, kv_format):
    cache, _ = make_cache(kv_format, head_dim=head_dim)
    layout = KV_LAYOUTS[kv_format]
    key, value = rows(32, head_dim=head_dim), rows(32, head_dim=head_dim, seed=1)
    kv.encode(cache, layout, key, value, torch.arange(16, 48))
    decoded = kv.decode(cache, layout, torch.tensor([2, 1]), head_dim)
    for got, source, plane in zip(decoded, (key, value), (layout.k, layout.v), strict=True):
        assert got.dtype == torch.float32
        want = torch.cat([source[16:], source[:16]]).transpose(0, 1)
        if plane.scale_bytes:
            want = kv.decode_rows(*kv.encode_rows(want, plane), plane, head_dim)
        assert torch.equal(got, want.to(kv.STORAGE[kv_format] if not layout.quantized else torch.float32).float())


@pytest.mark.parametrize("kv_format", SQNR)
def test_quantised_rows_keep_their_quality(kv_format):
    layout = KV_LAYOUTS[kv_format]
    plane = layout.v if kv_format in ("k8v4", "k8v3") else layout.k
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    if kv_format != "k8v3":  # which is made for normal values
        x[:, 5::16] *= 10
    error = kv.decode_rows(*kv.encode_rows(x, plane), plane, 128) - x
    measured = 20 * torch.log10(x.norm() / error.norm()).item()
    print(f"{kv_format} {measured:.1f} dB")
    assert measured > SQNR[kv_format]


@pytest.mark.parametrize("kv_format", SQNR)
def test_zeros_stay_zeros(kv_format):
    for plane in (KV_LAYOUTS[kv_format].k, KV_LAYOUTS[kv_format].v):
        assert not kv.decode_rows(*kv.encode_rows(torch.zeros(2, 72), plane), plane, 72).any()


def test_a_page_holds_as_many_tokens_as_the_formats_promise():
    sizes = {name: [KV_LAYOUTS[name].token_bytes(d) for d in (64, 128, 256)] for name in FORMATS}
    assert sizes["fp16"] == sizes["bf16"] == [256, 512, 1024]
    assert sizes["int8"] == [136, 264, 520]
    assert sizes["k8v8_g32"] == [136, 268, 532] and sizes["k8v8_g16"] == [140, 276, 548]
    assert sizes["k8v4"] == [104, 204, 404]
    assert sizes["k8v3"] == [96, 184, 364]


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
        kv.planes(cache.transpose(1, 2).contiguous().transpose(1, 2), KV_LAYOUTS["fp16"], 8)
