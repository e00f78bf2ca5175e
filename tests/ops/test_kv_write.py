# SPDX-License-Identifier: BSD-3-Clause
"""kv_cache_write: bytes equal to the reference's."""

import pytest
import torch
from pages import activations, empty_cache

from vllm_superl8.formats import kv
from vllm_superl8.formats.layout import KV_LAYOUTS
from vllm_superl8.ops import kv_write  # noqa: F401  registers the op
from vllm_superl8.ops.registry import OPS

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORMATS = sorted(kv.STORAGE)
QUANTIZED = [name for name in FORMATS if KV_LAYOUTS[name].quantized]


def bytes_of(cache: torch.Tensor) -> torch.Tensor:
    """Everything in a cache's storage, the gaps between pages included."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage).cpu()


def on(device: torch.device, cache: torch.Tensor) -> torch.Tensor:
    moved = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).to(device, copy=True).view(cache.dtype)
    return moved.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def check(kernels, key, value, cache, slots, kv_format):
    """The kernel and the reference, each on a copy of cache; returns the kernel's."""
    want, got = on(torch.device("cpu"), cache), on(kernels.device, cache)
    OPS["kv_cache_write"].reference(key, value, want, slots, kv_format)
    kernels.run(
        "kv_cache_write", *(x.to(kernels.device) for x in (key, value)), got, slots.to(kernels.device), kv_format
    )
    assert torch.equal(bytes_of(got), bytes_of(want))
    return got


def rows(tokens, heads, head_dim, dtype, seed=0):
    x = activations(torch.Generator().manual_seed(seed), tokens, heads, head_dim, mean=2.0)
    return x.to(dtype)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 80, 96, 112, 128, 192, 256])
def test_kv_write_equals_reference(kernels, head_dim, dtype, kv_format):
    key, value = rows(5, 3, head_dim, dtype), rows(5, 3, head_dim, dtype, seed=1)
    slots = torch.tensor([33, 0, -1, 15, 47])  # first, last and middle tokens of pages; one to skip
    cache = empty_cache(kv_format, 3, 3, 16, head_dim, gap=32)
    check(kernels, key, value, cache, slots, kv_format)


@pytest.mark.parametrize("kv_format", ["int8", "fp16"])
@pytest.mark.parametrize("page_size", [16, 32, 48, 256])
def test_kv_write_takes_any_page_size(kernels, page_size, kv_format):
    key, value = rows(4, 2, 64, torch.float16), rows(4, 2, 64, torch.float16, seed=1)
    slots = torch.tensor([page_size - 1, page_size, 2 * page_size - 1, 5])
    check(kernels, key, value, empty_cache(kv_format, 2, 2, page_size, 64), slots, kv_format)


@pytest.mark.parametrize("kv_format", ["int8", "fp16"])
@pytest.mark.parametrize("first", [0, 4, 3], ids=["aligned", "quads", "odd"])
def test_kv_write_takes_strided_rows(kernels, first, kv_format):
    fused = rows(3, 5, 76, torch.float16)  # as a view into the output of a fused projection
    key, value = fused[:, 1:3, first : first + 64], fused[:, 3:5, first : first + 64]
    check(kernels, key, value, empty_cache(kv_format, 1, 2, 16, 64), torch.tensor([3, 0, 7]), kv_format)


def test_kv_write_writes_as_many_tokens_as_there_are_slots(kernels):
    key, value = rows(6, 2, 64, torch.float16), rows(6, 2, 64, torch.float16, seed=1)
    check(kernels, key, value, empty_cache("int8", 2, 2, 16, 64), torch.tensor([1, 2]), "int8")
    check(kernels, key, value, empty_cache("int8", 2, 2, 16, 64), torch.empty(0, dtype=torch.int64), "int8")


def test_kv_write_quantises_zeros_ties_and_extremes_by_the_rule(kernels):
    key = torch.zeros(4, 1, 64)
    key[0, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # a scale of 1: ties go to even
    key[1, 0, 0], key[1, 0, 1] = -3e38, 1e-30
    key[2, 0, 0] = 1e-44  # a scale that is not a normal number
    cache = check(kernels, key, -key, empty_cache("int8", 1, 1, 16, 64), torch.arange(4), "int8")
    codes, _, scales, _ = kv.planes(cache.cpu(), KV_LAYOUTS["int8"], 64)
    codes, scales = codes.view(torch.int8), scales[..., 0]
    assert codes[0, 0, 0, :4].tolist() == [127, 0, 2, -2]
    assert codes[0, 0, 1, 0] == -127
    assert scales[0, 0, 3] == 1.0 and not codes[0, 0, 3].any()


@pytest.mark.parametrize("kv_format", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_kv_write_does_not_hide_what_is_not_a_number(kernels, bad, kv_format):
    key = rows(2, 1, 64, torch.float16)
    key[1, 0, 40] = bad
    cache = empty_cache(kv_format, 1, 1, 16, 64).to(kernels.device)
    slots = torch.arange(2, device=kernels.device)
    kernels.run("kv_cache_write", key.to(kernels.device), key.to(kernels.device), cache, slots, kv_format)
    k, v = kv.decode(cache, KV_LAYOUTS[kv_format], torch.tensor([0], device=kernels.device), 64)
    assert torch.isfinite(k[:, 0]).all() and torch.isfinite(v[:, 0]).all()
    for rows_of, plane in ((k, KV_LAYOUTS[kv_format].k), (v, KV_LAYOUTS[kv_format].v)):
        group = plane.group or 64
        assert not torch.isfinite(rows_of[0, 1].unflatten(0, (-1, min(group, 64)))[40 // group]).any()


def test_kv_write_refuses_what_does_not_fit(kernels):
    device = kernels.device
    key, slots = torch.ones(2, 2, 64, device=device), torch.arange(2, device=device)
    cache = empty_cache("int8", 1, 2, 16, 64).to(device)

    def write(key=key, value=key, cache=cache, slots=slots, kv_format="int8"):
        kernels.run("kv_cache_write", key, value, cache, slots, kv_format)

    with pytest.raises(ValueError, match=r"key is \(2, 2, 64\) torch.float32, value \(1, 2, 64\)"):
        write(value=key[:1])
    with pytest.raises(ValueError, match="2 slots for 1 tokens"):
        write(key=key[:1], value=key[:1])
    with pytest.raises(ValueError, match="key has 1 KV heads, the cache 2"):
        write(key=key[:, :1], value=key[:, :1])
    with pytest.raises(ValueError, match=r"slot_mapping must be contiguous int64, got torch\.int32"):
        write(slots=slots.int())
    with pytest.raises(ValueError, match="last dimension of key and value must be contiguous"):
        write(key=key.transpose(0, 2).contiguous().transpose(0, 2), value=key)
    with pytest.raises(ValueError, match="head_dim is 4, wanted a multiple of 8 up to 256"):
        few = key[..., :4]
        write(key=few, value=few, cache=empty_cache("int8", 1, 2, 16, 4).to(device))
    with pytest.raises(ValueError, match="a page has 8 tokens, wanted a multiple of 16"):
        write(cache=empty_cache("int8", 1, 2, 8, 64).to(device))


def test_kv_write_is_deterministic(kernels):
    key, value = rows(4, 3, 128, torch.bfloat16), rows(4, 3, 128, torch.bfloat16, seed=1)
    cache, slots = empty_cache("int8", 2, 3, 16, 128), torch.tensor([3, 30, 7, 0])
    first = bytes_of(check(kernels, key, value, cache, slots, "int8"))
    for _ in range(3):
        assert torch.equal(first, bytes_of(check(kernels, key, value, cache, slots, "int8")))
