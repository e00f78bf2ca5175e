# SPDX-License-Identifier: BSD-3-Clause
"""Perplexity of two real models on the first 512 tokens of Emma (Jane Austen, public domain).

Reference: nll of a float32 forward pass over the dequantised weights, which agrees with llama.cpp.
"""

import math
from pathlib import Path

import pytest

from vllm_superl8.tools.fetch import fetch

from engine import engine, nll

TEXT = (Path(__file__).parent.parent / "data" / "emma.txt").read_text()
REFERENCE_NLL = {"smollm2": 3.5378, "gemma3-270m": 3.4789}
ADDS_BOS = {"smollm2": False, "gemma3-270m": True}


def perplexity(model: str, **options) -> float:
    with engine(fetch(model), quantization="superl8", **options) as llm:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        if ADDS_BOS[model]:
            ids = [tokenizer.bos_token_id, *ids]
        return math.exp(nll(llm, ids[:512]))


@pytest.mark.parametrize(
    "model,options,limit",
    [
        pytest.param(model, {"dtype": "bfloat16", **options}, limit, id=f"{name}-{model}")
        for name, options, limit, models in (
            ("16-bit", {"additional_config": {"superl8": {"ignore": ["*"]}}}, 0.01, REFERENCE_NLL),
            (
                "w8a8-token",
                {"dtype": "float32", "additional_config": {"superl8": {"activation": "token"}}},
                0.03,
                REFERENCE_NLL,
            ),
            ("blocks", {}, 0.01, REFERENCE_NLL),
            ("blocks-kv-int8", {"kv_cache_dtype": "int8"}, 0.03, ["gemma3-270m"]),
            (
                "w8a8-group128-kv-int8",
                {"kv_cache_dtype": "int8", "additional_config": {"superl8": {"activation": "group128"}}},
                0.03,
                ["smollm2"],
            ),
        )
        for model in models
    ],
)
def test_perplexity_stays_near_the_reference(model, options, limit):
    reference = math.exp(REFERENCE_NLL[model])
    ours = perplexity(model, **options)
    print(f"{model} {options}: perplexity {ours:.3f}, reference {reference:.3f}, {ours / reference - 1:+.2%}")
    assert abs(ours / reference - 1) < limit
