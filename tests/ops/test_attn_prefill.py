# SPDX-License-Identifier: BSD-3-Clause
"""paged_attention of long queries: attn_prefill, alone and beside attn_decode in mixed batches."""

import pytest
import torch
from pages import CASES, EXACT, FEATURES, QUANTIZED, Batch, check

from tolerances import QUALITY, Quality

BOTH = ["int8", "fp16"]


@pytest.mark.parametrize(("kv_format", "dtype", "head_dim"), CASES)
def test_attn_prefill_matches_reference(kernels, kv_format, dtype, head_dim):
    # 66 rows are two tiles; the second sequence continues a context.
    check(kernels, Batch((33, 17), (33, 40), kv_format, dtype, 2, 1, head_dim))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("query_len", [32, 33, 63, 64, 65, 129])
def test_attn_prefill_takes_any_length(kernels, query_len, kv_format):
    # One head a KV head: a row is a token, 64 rows a tile, 32 keys a step.
    check(kernels, Batch((query_len, 33), (query_len, 40), kv_format, num_heads=1, num_kv_heads=1))


@pytest.mark.parametrize(("kv_format", "dtype"), [*EXACT, ("fp32", torch.float32), *QUANTIZED[1:]])
def test_attn_prefill_continues_a_long_context(kernels, kv_format, dtype):
    check(kernels, Batch((20,), (511,), kv_format, dtype, 2, 1))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("page_size", [16, 32, 48, 144])
def test_attn_prefill_takes_any_page_size(kernels, page_size, kv_format):
    check(kernels, Batch((30, 20), (97, 150), kv_format, num_heads=2, num_kv_heads=1, page_size=page_size))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1), (8, 1), (71, 1)])
def test_attn_prefill_takes_any_group(kernels, num_heads, num_kv_heads, kv_format):
    lens = (33, 18) if num_heads < 9 else (2, 1)
    check(kernels, Batch(lens, (40, 50), kv_format, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
@pytest.mark.parametrize("feature", FEATURES)
def test_attn_prefill_has_features(kernels, feature, kv_format, dtype):
    check(kernels, Batch((33, 20), (33, 90), kv_format, dtype, options=FEATURES[feature]))


@pytest.mark.parametrize(("kv_format", "dtype"), QUANTIZED[1:])
@pytest.mark.parametrize("feature", ["window_20", "everything", "bidirectional_window"])
def test_attn_prefill_has_features_with_every_format(kernels, feature, kv_format, dtype):
    check(kernels, Batch((17,), (90,), kv_format, dtype, 4, 1, 72, options=FEATURES[feature]))


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("window", [0, 15, 46, 47, 48])
def test_attn_prefill_masks_at_any_place_of_a_tile(kernels, window, kv_format):
    # Full tiles of 16 tokens: ends and windows fall before, on and after the edges of tiles of 32 keys.
    firsts = (30, 31, 32, 63, 64)
    options = {"sliding_window": window}
    seqs = tuple(first + 16 for first in firsts)
    check(kernels, Batch((16,) * len(firsts), seqs, kv_format, torch.float16, 4, 1, options=options))


@pytest.mark.parametrize("query_lens", [(20, 20), (1, 1)], ids=["prefill", "decode"])
def test_paged_attention_looks_at_no_entry_beyond_a_full_block_table(kernels, query_lens):
    # For the sanitizers: the last sequence's last page is the last number of the table.
    batch = Batch(query_lens, (20, 49), num_heads=2, num_kv_heads=1)
    batch.block_table = batch.block_table[:2, :4].contiguous()
    batch.seq_lens_tensor, batch.query_start_loc = batch.seq_lens_tensor[:2], batch.query_start_loc[:3]
    check(kernels, batch, num_splits=2)


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
@pytest.mark.parametrize("feature", ["window_20", "everything", "bidirectional"])
@pytest.mark.parametrize("num_splits", [2, 5])
def test_attn_prefill_splits_the_keys_of_short_queries(kernels, num_splits, feature, kv_format, dtype):
    # More rows than attn_decode takes, few enough tokens to split.
    check(kernels, Batch((9, 16), (9, 70), kv_format, dtype, 4, 1, options=FEATURES[feature]), num_splits)


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_mixed_batches_match_the_reference(kernels, num_splits, kv_format):
    lens = (1, 0, 3, 33, 17, 1)
    check(kernels, Batch(lens, (33, 0, 20, 60, 17, 1), kv_format, num_heads=2, num_kv_heads=1, padding=5), num_splits)


@pytest.mark.parametrize("kv_format", BOTH)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decodes_of_a_mixed_batch_equal_those_of_a_decode_batch(kernels, num_splits, kv_format):
    batch = Batch((1, 1, 40), (33, 50, 40), kv_format)
    mixed = batch.call(kernels, num_splits)
    batch.query, batch.query_lens = batch.query[:2], (1, 1)
    batch.block_table, batch.seq_lens_tensor = batch.block_table[:2], batch.seq_lens_tensor[:2]
    batch.query_start_loc = batch.query_start_loc[:3]
    assert torch.equal(mixed[:2], batch.call(kernels, num_splits))


@pytest.mark.parametrize("kv_format", BOTH)
def test_attn_prefill_is_deterministic_and_independent_of_the_batch(kernels, kv_format):
    batch = Batch((33, 20), (50, 64), kv_format, torch.float16, 2, 1, 128)
    first = batch.call(kernels)
    for _ in range(3):
        assert torch.equal(first, batch.call(kernels))
    batch.query, batch.query_lens = batch.query[33:], (20,)
    batch.block_table, batch.seq_lens_tensor = batch.block_table[1:], batch.seq_lens_tensor[1:]
    batch.query_start_loc = torch.tensor([0, 20, 20], dtype=torch.int32)
    assert torch.equal(first[33:], batch.call(kernels))


@pytest.mark.parametrize("kv_format", BOTH)
def test_a_prompt_in_chunks_equals_it_in_one(kernels, kv_format):
    # 32 tokens are whole tiles of 64 rows, so that a token's row stands in the same place.
    whole = Batch((64,), (64,), kv_format, num_heads=2, num_kv_heads=1)
    want = whole.call(kernels)
    for first in (0, 32):
        chunk = Batch((64,), (64,), kv_format, num_heads=2, num_kv_heads=1)
        chunk.query, chunk.query_lens = whole.query[first : first + 32], (32,)
        chunk.seq_lens_tensor[0] = first + 32
        chunk.query_start_loc = torch.tensor([0, 32, 32], dtype=torch.int32)
        assert torch.equal(chunk.call(kernels), want[first : first + 32])


@pytest.mark.parametrize("kv_format", [name for name, _ in QUANTIZED])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attn_prefill_on_a_quantised_cache_keeps_the_quality(kernels, head_dim, kv_format):
    batch = Batch((60, 33), (60, 150), kv_format, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    assert Quality.of(batch.call(kernels), batch.want()).meets(QUALITY["paged_attention"])
