# SPDX-License-Identifier: BSD-3-Clause
"""Encoder-only models through vLLM's pooling runner against transformers: every token sees its whole sequence."""

import pytest
import tokenizers
import torch
import transformers as tf

import tiny
from engine import engine

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": 0,
}

CONFIGS = {
    "bert": lambda: tf.BertConfig(**COMMON, architectures=["BertModel"]),
    # Two of three layers see 8 tokens to either side.
    "modernbert": lambda: tf.ModernBertConfig(
        **COMMON, local_attention=16, global_attn_every_n_layers=3, architectures=["ModernBertModel"], cls_token_id=1,
        bos_token_id=1, eos_token_id=2, sep_token_id=2,
    ),
    "qwen3": lambda: tf.Qwen3Config(
        **{**COMMON, "num_key_value_heads": 2}, head_dim=32, architectures=["Qwen3ForCausalLM"], is_causal=False
    ),
}  # fmt: skip
POOLER = {"bert": "CLS", "modernbert": "CLS", "qwen3": "LAST"}


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_match_transformers(tmp_path, name):
    torch.manual_seed(7)
    model = tf.AutoModel.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(COMMON["vocab_size"])}, unk_token="w1")
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words)).save_pretrained(tmp_path)
    prompts = [tiny.tokens(length, seed=length) for length in (1, 17, 60, 100)]
    with torch.no_grad():
        first = [model(torch.tensor([prompt])).last_hidden_state[0, 0] for prompt in (prompts[2], prompts[2][:-5])]
    assert (first[0] - first[1]).norm() > 1e-2 * first[0].norm(), "the first token does not see the last ones"
    with engine(
        tmp_path, runner="pooling", dtype="float32", max_model_len=256,
        pooler_config={"seq_pooling_type": POOLER[name], "use_activation": True},
    ) as llm:  # fmt: skip
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        want = torch.nn.functional.normalize(hidden[-1 if POOLER[name] == "LAST" else 0], dim=0)
        error = (torch.tensor(output.outputs.embedding) - want).norm().item()
        print(f"{name} {len(prompt)} {error:.1e}")
        assert error < 1e-5
