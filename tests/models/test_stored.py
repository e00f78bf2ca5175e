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
MOE_BAR = (0.2, 0.75)  # measured 0.064 and 0.849

SERVED = {
    "ct-w8a8-asymmetric": "qwen3",
    "gptq-4-g32-desc_act": "qwen3",
    "awq": "qwen3",
    "fp8-block": "qwen3",
    "modelopt-nvfp4": "qwen3",
    "bitsandbytes-nf4-nested": "qwen3",
    "gptq-8-rows": "qwen3_moe",
}


CASES = [*SERVED, "weight_bits=4"]
CASES += [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.every])
    for name in tiny_stored.SCHEMES
    if name not in SERVED
]


@pytest.mark.parametrize("name", CASES)
def test_stored_model_matches_transformers(tmp_path, name):
    online = name == "weight_bits=4"
    scheme = tiny_stored.rounded_to_4_bits() if online else tiny_stored.SCHEMES[name]
    architecture = SERVED.get(name, "qwen3")
    model = tiny_stored.write(scheme, tmp_path, architecture)
    ids = torch.tensor([tiny.tokens()])
    with torch.no_grad():
        reference = model(ids).logits[0, :-1].log_softmax(-1)
    options = {"quantization": "superl8", "additional_config": {"superl8": {"weight_bits": 4}}} if online else {}
    if name.startswith("ct"):  # others are taken over because the platform is ours
        options = {"quantization": "superl8"}
    with engine(tmp_path, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        ours = prompt_logprobs(llm, tiny.tokens())
    kld = (reference.exp() * (reference - ours)).sum(-1).mean().item()
    agreement = (reference.argmax(-1) == ours.argmax(-1)).float().mean().item()
    print(f"{name}: kld {kld:.2e} top-1 {agreement:.3f}")
    largest_kld, smallest_agreement = MOE_BAR if architecture == "qwen3_moe" else BAR
    assert kld < largest_kld
    assert agreement >= smallest_agreement
