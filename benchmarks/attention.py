# SPDX-License-Identifier: BSD-3-Clause
"""Attention over the paged cache, 32 heads on 8 KV heads of 128: decode of batches at several contexts, prefill."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_superl8.attention.metadata import num_decode_splits
from vllm_superl8.device import multiprocessors
from vllm_superl8.formats import kv
from vllm_superl8.formats.layout import KV_LAYOUTS
from vllm_superl8.ops import paged_attention, registry
from vllm_superl8.tools.measure import Row, cold_copies, time_us

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZE = 16
SCALE = HEAD_DIM**-0.5
CHECKED_TOKENS = 32
LARGEST_ERROR = {"fp16": 2e-3, "int8": 3e-2}  # with an int8 cache the query is quantised too


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    q_len: int
    kv_format: str

    @property
    def token_bytes(self) -> int:
        return NUM_KV_HEADS * KV_LAYOUTS[self.kv_format].token_bytes(HEAD_DIM)

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.context * self.token_bytes

    @property
    def operations(self) -> int:
        """Of Q K^T and P V over the (query, key) pairs that a causal mask leaves."""
        pairs = self.q_len * (self.context - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return 4 * self.batch * pairs * NUM_HEADS * HEAD_DIM

    @property
    def moved_bytes(self) -> int:
        return self.cache_bytes + 2 * 2 * self.batch * self.q_len * NUM_HEADS * HEAD_DIM


def cases(quick: bool) -> Iterator[Case]:
    batches, contexts, prompts = (
        ((1, 8), (4096,), (2048,)) if quick else ((1, 8, 32), (512, 4096, 32768), (512, 2048, 8192))
    )
    for kv_format in ("fp16", "int8"):
        for batch in batches:
            for context in contexts:
                yield Case(batch, context, 1, kv_format)
        for q_len in prompts:
            yield Case(1, q_len, q_len, kv_format)


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for case in cases(quick):
        free_bytes, _ = torch.cuda.mem_get_info()
        if 3 * case.cache_bytes > free_bytes:
            print(f"attention: {case} left out: it needs {3 * case.cache_bytes >> 20} MiB, {free_bytes >> 20} are free")
            continue
        yield attention_row(case)


def attention_row(case: Case) -> Row:
    tokens, pages = case.batch * case.q_len, case.context // PAGE_SIZE
    query = torch.randn(tokens, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
    block_table = torch.randperm(case.batch * pages, device="cuda", dtype=torch.int32).view(case.batch, pages)
    seq_lens = torch.full((case.batch,), case.context, device="cuda", dtype=torch.int32)
    query_start_loc = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.q_len
    splits = 1
    if case.q_len == 1:
        splits = num_decode_splits(case.batch, NUM_KV_HEADS, case.context, multiprocessors(torch.device("cuda")))
    kv_format = "int8" if case.kv_format == "int8" else "auto"
    caches = [make_cache(case) for _ in range(cold_copies(case.cache_bytes))]
    out = torch.empty_like(query)
    calls = [
        lambda cache=cache: paged_attention(
            query, cache, out, block_table, seq_lens, query_start_loc, case.q_len, splits, SCALE, kv_format
        )
        for cache in caches
    ]
    calls[0]()
    error = first_sequence_error(case, query, caches[0], out, block_table, seq_lens, kv_format)
    if not error < LARGEST_ERROR[case.kv_format]:
        raise RuntimeError(f"paged_attention {case}: relative error {error:.2g}")
    fields = {
        "op": "paged_attention",
        "batch": case.batch,
        "context": case.context,
        "q_len": case.q_len,
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "kv_format": case.kv_format,
    }
    return Row(fields, time_us(calls), case.operations, case.moved_bytes, error)


def make_cache(case: Case) -> torch.Tensor:
    """A cache of random keys and values, (num_pages, num_kv_heads, page_size, content)."""
    num_pages = case.batch * case.context // PAGE_SIZE
    if case.kv_format != "int8":
        return torch.randn(num_pages, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM, device="cuda", dtype=torch.float16)
    content = KV_LAYOUTS["int8"].token_bytes(HEAD_DIM)
    cache = torch.randint(-127, 128, (num_pages, NUM_KV_HEADS, PAGE_SIZE, content), device="cuda", dtype=torch.int8)
    *_, k_scales, v_scales = kv.planes(cache, KV_LAYOUTS["int8"], HEAD_DIM)
    k_scales.uniform_(0.01, 0.03)
    v_scales.uniform_(0.01, 0.03)
    return cache


def first_sequence_error(case, query, cache, out, block_table, seq_lens, kv_format) -> float:
    """Relative error of the first sequence's last query tokens against the reference."""
    count = min(CHECKED_TOKENS, case.q_len)
    last = slice(case.q_len - count, case.q_len)
    wanted = torch.empty_like(query[last])
    starts = torch.tensor([0, count], device="cuda", dtype=torch.int32)
    registry.OPS["paged_attention"].reference(
        query[last], cache, wanted, block_table[:1], seq_lens[:1], starts, count, 1, SCALE, kv_format
    )
    return ((out[last].float() - wanted.float()).norm() / wanted.float().norm()).item()
