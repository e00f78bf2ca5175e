# SPDX-License-Identifier: BSD-3-Clause
"""Requests that share batches, a cached prefix and prefill chunks get the tokens that they get alone."""

import pytest

import tiny
from engine import engine, greedy


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("qwen3", "int8"), ("gemma3", "auto")])
def test_batched_requests_give_the_tokens_of_single_ones(name, kv_cache_dtype, tmp_path):
    tiny.write(name, tmp_path)
    prefix = tiny.tokens(70)
    prompts = [prefix + tiny.tokens(10 + 3 * i, seed=20 + i) for i in range(8)]
    with engine(
        tmp_path, dtype="float32", kv_cache_dtype=kv_cache_dtype, skip_tokenizer_init=True, max_num_seqs=8,
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64,
    ) as llm:  # fmt: skip
        alone = [greedy(llm, [prompt], max_tokens=6)[0] for prompt in prompts]
        llm.reset_prefix_cache()
        together = greedy(llm, prompts, max_tokens=6)
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 4, "the prompts must not all have one continuation"
