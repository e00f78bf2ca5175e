# SPDX-License-Identifier: BSD-3-Clause
"""Tiny models through vLLM against transformers in float32: every architecture, dtype and KV cache format."""

import pytest
import torch

import tiny
from engine import engine, greedy, prompt_logprobs

ARCHITECTURES = list(tiny.CONFIGS)

# Largest mean KLD (nats) and smallest share of equal top-1 tokens, by what is not exact.
BARS = {
    ("float32", "auto", None): (1e-6, 1.0),
    ("float16", "auto", None): (1e-3, 0.97),
    ("bfloat16", "auto", None): (2e-2, 0.90),
    ("float32", "int8", None): (5e-3, 0.94),
    ("float16", "int8", None): (5e-3, 0.94),
    ("bfloat16", "int8", None): (2e-2, 0.90),
    ("float32", "auto", "superl8"): (5e-2, 0.85),
    ("float16", "int8", "superl8"): (5e-2, 0.85),
    ("bfloat16", "int8", "superl8"): (5e-2, 0.85),
}


# Rounding sends some tokens of a random router to other experts, whose outputs have nothing in common.
MOE_BAR = (0.2, 0.75)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    """(folder, reference log-probabilities of tiny.tokens(), reference greedy continuation)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.write(request.param, folder)
    ids = torch.tensor([tiny.tokens()])
    with torch.no_grad():
        reference = model(ids).logits[0, :-1].log_softmax(-1)
        continuation = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert reference.exp().max(-1).values.mean() > 0.05, "the model is too flat for its top token to mean anything"
    return folder, reference, continuation.tolist()


@pytest.mark.parametrize("dtype,kv_cache_dtype,quantization", BARS, ids=lambda v: str(v))
def test_tiny_model_matches_transformers(checkpoint, dtype, kv_cache_dtype, quantization):
    folder, reference, continuation = checkpoint
    if folder.name.startswith("gemma3") and dtype == "float16":
        dtype = "bfloat16"  # vLLM refuses Gemma 3 in float16, which overflows
    with engine(
        folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization, skip_tokenizer_init=True
    ) as llm:
        ours = prompt_logprobs(llm, tiny.tokens())
        generated = greedy(llm, [tiny.tokens()], max_tokens=12)[0]
    kld, agreement = tiny.compare(reference, ours)
    exact = (dtype, kv_cache_dtype, quantization) == ("float32", "auto", None)
    routed = folder.name.startswith("qwen3_moe") and not exact
    largest_kld, smallest_agreement = MOE_BAR if routed else BARS[dtype, kv_cache_dtype, quantization]
    assert kld < largest_kld
    assert agreement >= smallest_agreement
    if exact:
        assert generated == continuation
