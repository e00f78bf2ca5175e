# SPDX-License-Identifier: BSD-3-Clause
"""paged_attention of short queries: attn_decode, and attn_combine where keys are split."""

import pytest
import torch
from pages import CASES, EXACT, FEATURES, QUANTIZED, Batch, check

from vllm_superl8.formats import kv

from tolerances import QUALITY, Quality

BOTH = ["int8", "fp16"]


@pytest.mark.parametrize(("kv_format", "dtype", "head_dim"), CASES)
def test_attn_decode_matches_reference(kernels, kv_format, dtype, head_dim):
    check(kernels, Batch((1,) * 5, (1, 15, 16, 17, 33), kv_format, dtype, 2, 1, head_dim))


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
@pytest.mark.parametrize("num_splits", [2, 3, 20])
def test_attn_decode_joins_splits(kernels, num_splits, kv_format, dtype):
    # From several steps a split down to more splits than keys.
    check(kernels, Batch((1, 1, 2), (300, 3, 40), kv_format, dtype, 2, 1), num_splits)


@pytest.mark.parametrize(("kv_format", "dtype"), [*EXACT, ("fp32", torch.float32), *QUANTIZED[1:]])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attn_decode_matches_reference_over_many_steps(kernels, head_dim, kv_format, dtype):
    check(kernels, Batch((1,), (511,), kv_format, dtype, 2, 1, head_dim))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("page_size", [16, 32, 48, 144])
def test_attn_decode_takes_any_page_size(kernels, page_size, kv_format):
    check(kernels, Batch((1, 2, 1), (47, 97, 150), kv_format, num_heads=2, num_kv_heads=1, page_size=page_size), 2)


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1), (5, 1), (8, 1), (9, 1), (32, 1)])
def test_attn_decode_takes_any_group(kernels, num_heads, num_kv_heads, kv_format):
    check(kernels, Batch((1, 1), (20, 50), kv_format, torch.float16, num_heads, num_kv_heads, 128), 2)


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("query_len", [2, 3, 4, 8, 16])
def test_attn_decode_takes_several_query_tokens(kernels, query_len, num_splits, kv_format):
    # As speculative decoding sends them; the shortest context is the query itself.
    lens = (query_len, 1, query_len)
    check(kernels, Batch(lens, (query_len, 33, 40), kv_format, num_heads=2, num_kv_heads=1), num_splits)


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("feature", FEATURES)
def test_attn_decode_has_features(kernels, feature, num_splits, kv_format, dtype):
    check(kernels, Batch((1, 3, 4), (70, 40, 4), kv_format, dtype, options=FEATURES[feature]), num_splits)


@pytest.mark.parametrize(("kv_format", "dtype"), QUANTIZED[1:])
@pytest.mark.parametrize("feature", FEATURES)
def test_attn_decode_has_features_with_every_format(kernels, feature, kv_format, dtype):
    # Two blocks of rows, of sequences that end within a page.
    check(kernels, Batch((1, 3), (37, 20), kv_format, dtype, 4, 1, 128, options=FEATURES[feature]), 2)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_attn_decode_leaves_padding_and_empty_sequences_alone(kernels, num_splits):
    check(kernels, Batch((1, 0, 1, 0), (20, 5, 33, 0), padding=3), num_splits, max_query_len=1)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_attn_decode_skips_sequences_without_keys(kernels, num_splits):
    # A CUDA graph pads a batch with sequences of one token and no keys.
    batch = Batch((1, 1), (20, 17))
    batch.query_start_loc[-1] += 1
    batch.query = torch.cat([batch.query, batch.query[:1]])
    got = batch.call(kernels, num_splits)
    assert torch.isfinite(got[:2]).all()
    assert torch.isnan(got[2]).all()


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_attn_decode_gives_zeros_where_no_key_is_seen(kernels, num_splits, kv_format):
    # The first two of four tokens stand before the first key.
    batch = Batch((4,), (2,), kv_format)
    got = batch.call(kernels, num_splits)
    assert not got[:2].any()
    batch.query_lens, batch.query = (2,), batch.query[2:]
    batch.query_start_loc = torch.tensor([0, 2, 2], dtype=torch.int32)
    assert torch.equal(got[2:], batch.call(kernels, num_splits))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attn_decode_is_deterministic_and_independent_of_the_batch(kernels, num_splits, kv_format):
    batch = Batch((1, 2, 1), (100, 33, 65), kv_format, torch.float16, 2, 1, 128)
    first = batch.call(kernels, num_splits)
    for _ in range(3):  # the emulator resumes threads in another order each time
        assert torch.equal(first, batch.call(kernels, num_splits))
    batch.query_lens, batch.query = (1,), batch.query[3:]
    batch.block_table, batch.seq_lens_tensor = batch.block_table[2:], batch.seq_lens_tensor[2:]
    batch.query_start_loc = torch.tensor([0, 1, 1], dtype=torch.int32)
    assert torch.equal(first[3:], batch.call(kernels, num_splits, max_query_len=2))


@pytest.mark.parametrize("kv_format", [*BOTH, "k8v8_g32", "k8v8_g16", "k8v4", "k8v3"])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("plane", ["k", "v"])
def test_attn_decode_does_not_hide_what_is_not_a_number(kernels, plane, num_splits, kv_format):
    batch = Batch((1, 1), (100, 40), kv_format)
    clean = batch.call(kernels, num_splits)
    # A value of token 60, KV head 1, or the scales of its row.
    views = kv.planes(batch.cache, batch.layout, 64)
    views[("k", "v").index(plane) - (2 if batch.layout.quantized else 0)][batch.block_table[0, 3], 1, 12] = torch.nan
    got = batch.call(kernels, num_splits)
    assert torch.isnan(got[0, 2:]).all()
    assert torch.equal(got[0, :2], clean[0, :2]) and torch.equal(got[1], clean[1])


@pytest.mark.parametrize(("kv_format", "seed"), [("int8", 0), ("int8", 1), *((name, 2) for name, _ in QUANTIZED)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attn_decode_on_a_quantised_cache_keeps_the_quality(kernels, head_dim, kv_format, seed):
    batch = Batch((1,) * 3, (511, 128, 65), kv_format, head_dim=head_dim, seed=seed)
    assert Quality.of(batch.call(kernels), batch.want()).meets(QUALITY["paged_attention"])


@pytest.mark.parametrize("kv_format", BOTH)
def test_attn_decode_reaches_pages_beyond_4_gib(kernels, kv_format):
    batch = Batch((1,), (40,), kv_format)
    near = check(kernels, batch)
    # Pages 1.5 GiB apart, in memory that is reserved but for the pages themselves.
    pages = batch.cache.shape[0]
    stride = (3 << 29) // batch.cache.element_size()
    room = torch.empty(0, dtype=batch.cache.dtype, device=kernels.device)
    torch.utils.deterministic.fill_uninitialized_memory = False
    room = torch.empty(stride * pages, dtype=batch.cache.dtype, device=kernels.device)
    far = room.as_strided(batch.cache.shape, (stride, *batch.cache.stride()[1:]))
    far.copy_(batch.cache)
    batch.cache = far
    assert pages > 3 and torch.equal(near, batch.call(kernels))
