# SPDX-License-Identifier: BSD-3-Clause
"""Quantised checkpoints through vLLM against transformers with the values that the files stand for."""

import pytest
import torch

import tiny
import tiny_stored
from engine import engine, prompt_logprobs

# Largest mean KLD (nats) and smallest share of equal top-1 tokens: what quantising activations, and converting where
# int8 does not hold the stored codes, may cost. Measured: at most 0.017 and at least 0.889 (bitsandbytes-nf4).
BAR = (3e-2, 0.87)
# Rounding sends some tokens of a random router to other experts, whose outputs have nothing in common.
MOE_BAR = (0.2, 0.75)  # measured 0.083 and 0.789 (fp8)

ONLINE = "weight_bits-4"
SHOWN = [
    ("ct-w8a8-asymmetric", "qwen3"),
    ("gptq-4-g32-desc_act", "qwen3"),
    ("awq", "qwen3"),
    ("fp8-block", "qwen3"),
    ("modelopt-nvfp4", "qwen3"),
    ("bitsandbytes-nf4-nested", "qwen3"),
    (ONLINE, "qwen3"),
    ("gptq-8-rows", "qwen3_moe"),
]
EXPERTS = ("ct-w8a8", "awq", "gptq-4-g32-desc_act", "fp8", "ct-nvfp4", "bitsandbytes-int8")
EVERY = [(name, "qwen3") for name in tiny_stored.SCHEMES] + [(name, "qwen3_moe") for name in EXPERTS]
CASES = [*SHOWN, *(pytest.param(*case, marks=pytest.mark.every) for case in EVERY if case not in SHOWN)]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_stored_model_matches_transformers(tmp_path, name, architecture):
    online = name == ONLINE
    scheme = tiny_stored.rounded_to_4_bits() if online else tiny_stored.SCHEMES[name]
    model = tiny_stored.write(scheme, tmp_path, architecture)
    ids = torch.tensor([tiny.tokens()])
    with torch.no_grad():
        reference = model(ids).logits[0, :-1].log_softmax(-1)
    options = {"quantization": "superl8", "additional_config": {"superl8": {"weight_bits": 4}}} if online else {}
    if name.startswith("ct"):  # others are taken over because the platform is ours
        options = {"quantization": "superl8"}
    with engine(tmp_path, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        ours = prompt_logprobs(llm, tiny.tokens())
    kld, agreement = tiny.compare(reference, ours)
    largest_kld, smallest_agreement = MOE_BAR if architecture == "qwen3_moe" else BAR
    assert kld < largest_kld
    assert agreement >= smallest_agreement
