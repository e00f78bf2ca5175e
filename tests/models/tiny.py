# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random-weight checkpoints of real architectures, written by transformers with a fixed seed.

Weights are wide (std 0.08), so that argmax ties are unlikely; some channels of the embedding are outliers and the norm
weights are not all ones, so that means, scales and outliers matter.
"""

import torch
import transformers as tf

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**COMMON, head_dim=32, tie_word_embeddings=False),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, tie_word_embeddings=True),  # biases on q, k and v
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=64, tie_word_embeddings=True),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **COMMON,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}


def write(name: str, folder, configs=CONFIGS) -> tf.PreTrainedModel:
    """Write checkpoint `name` (float32 values that bfloat16 holds exactly) to folder; returns the model in float32."""
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(configs[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                if parameter_name == "model.norm.weight":
                    parameter.add_(2.0)  # sharper predictions
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.5, 0.5)
            elif "embed_tokens" in parameter_name:
                parameter[:, ::37] *= 8
            parameter.copy_(parameter.bfloat16().float())
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model


def tokens(length=200, seed=3) -> list[int]:
    """A fixed sequence of token ids."""
    return torch.randint(3, COMMON["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def compare(reference: torch.Tensor, ours: torch.Tensor) -> tuple[float, float]:
    """Mean KLD (nats) and share of equal top-1 tokens of two tables of log-probabilities (tokens, vocab)."""
    kld = (reference.exp() * (reference - ours)).sum(-1).mean().item()
    agreement = (reference.argmax(-1) == ours.argmax(-1)).float().mean().item()
    print(f"kld {kld:.2e} top-1 {agreement:.3f}")
    return kld, agreement
