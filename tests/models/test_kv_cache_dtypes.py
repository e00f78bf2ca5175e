# SPDX-License-Identifier: BSD-3-Clause
"""Every --kv-cache-dtype through the engine: tokens that fit, quality, prefix cache and chunks."""

import functools

import pytest
import torch

from vllm_superl8.attention import kv_cache
from vllm_superl8.formats.layout import KV_LAYOUTS

import tiny
from engine import KV_CACHE_BYTES, engine, greedy, prompt_logprobs

# Largest mean KLD (nats) against transformers in float32. Random weights forgive nothing: measured 4e-4 to 5e-4 with
# int8 V, 0.076 with 4 bits, 0.43 with 3 (0.12 in Gemma 3).
KLD = {"int8": 2e-3, "k8v8_g32": 2e-3, "k8v8_g16": 2e-3, "k8v4": 0.15, "k8v3": 0.8}


def test_every_name_is_known_to_vllm():
    from vllm.config.cache import KV_CACHE_DTYPES

    kv_cache.register()
    quantized = {name for name, layout in KV_LAYOUTS.items() if layout.quantized}
    assert quantized == set(KLD) | {"k8v8", "int8_per_token_head"}
    assert quantized | {"auto", "float16", "bfloat16"} == set(kv_cache.supported_names())
    assert set(kv_cache.supported_names()) <= set(KV_CACHE_DTYPES)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: superl8 takes auto, bfloat16, float16, int8"):
        kv_cache.quantized_layout("fp8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """family -> (folder, configuration, log-probabilities of tiny.tokens()), written once."""

    @functools.cache
    def write(family):
        folder = tmp_path_factory.mktemp(family)
        model = tiny.write(family, folder)
        with torch.no_grad():
            reference = model(torch.tensor([tiny.tokens()])).logits[0, :-1].log_softmax(-1)
        return folder, model.config, reference

    return write


SERVED = [("qwen3", name) for name in ("int8_per_token_head", "k8v8_g32", "k8v8_g16", "k8v4", "k8v3")]
SERVED += [("gemma3", "k8v3")]  # every other layer has a sliding window


@pytest.mark.parametrize(("family", "name"), SERVED)
def test_kv_cache_dtype_serves_in_chunks_and_from_cached_prefixes(checkpoint, family, name):
    folder, config, reference = checkpoint(family)
    prefix = tiny.tokens(70)
    prompts = [prefix + tiny.tokens(10 + 3 * i, seed=20 + i) for i in range(4)]
    with engine(
        folder, dtype="float32", kv_cache_dtype=name, skip_tokenizer_init=True, enable_prefix_caching=True,
        enable_chunked_prefill=True, max_num_batched_tokens=64, block_size=32,
    ) as llm:  # fmt: skip
        ours = prompt_logprobs(llm, tiny.tokens())
        plain = [greedy(llm, [prompt], max_tokens=4)[0] for prompt in prompts if llm.reset_prefix_cache()]
        cached = greedy(llm, prompts, max_tokens=4)
        cache = llm.llm_engine.vllm_config.cache_config
        pages, page_tokens = cache.num_gpu_blocks, cache.block_size
    layout = KV_LAYOUTS[name]
    kld, _ = tiny.compare(reference, ours)
    assert kld < KLD[layout.name]
    assert cached == plain and len(plain) == 4
    layers = {"qwen3": 3, "gemma3": 2}[family]  # of a group: Gemma 3's windowed and full layers take pages in turn
    token_bytes = layout.token_bytes(config.head_dim) * config.num_key_value_heads * layers
    assert pages == KV_CACHE_BYTES // (token_bytes * page_tokens)
