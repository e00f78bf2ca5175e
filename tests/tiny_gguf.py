# SPDX-License-Identifier: BSD-3-Clause
"""Small GGUF files as llama.cpp's converter writes them, from transformers models with random weights.

What the converter changes (convert_hf_to_gguf.py): rows of q and k in Llama files alternate between the halves of a
head, Gemma's norm weights are stored with 1 added, experts are one tensor a layer.
"""

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as tf
from gguf.constants import GGMLQuantizationType as Type
from models.tiny import COMMON, CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ARCHITECTURE = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
}
"""Names in models.tiny (and qwen2_moe) to general.architecture."""

SPECIAL = ["<pad>", "<bos>", "<|im_end|>", "<unk>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
TEXT = (Path(__file__).parent / "data" / "emma.txt").read_text()


def config(name: str) -> tf.PretrainedConfig:
    if name == "qwen2_moe":
        return tf.Qwen2MoeConfig(
            **COMMON,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=96,
            norm_topk_prob=False,
            tie_word_embeddings=False,
        )
    return CONFIGS[name]()


def model(name: str, **changes) -> tf.PreTrainedModel:
    """Model `name` in float32 with random weights; norm weights and biases are not all ones and zeros."""
    torch.manual_seed(7)
    settings = config(name)
    settings.update(changes)
    built = tf.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a byte-level BPE vocabulary of COMMON["vocab_size"] tokens, trained on Emma."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=COMMON["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    ids = tokenizer.get_vocab()
    known = set(ids)
    merges = []
    for token in sorted(known - set(SPECIAL) - set(alphabet), key=ids.get):
        # the merge that made it: the split whose parts came first
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if {token[:i], token[i:]} <= known]
        merges.append(" ".join(min(splits, key=lambda parts: max(ids[parts[0]], ids[parts[1]]))))
    return sorted(ids, key=ids.get), merges


def tensors(built: tf.PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    """GGUF name to values, as the converter stores them."""
    settings = built.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURE[name])
    names = gguf.get_tensor_name_map(arch, settings.num_hidden_layers)
    stored = {}
    for key, value in built.state_dict().items():
        layer, experts, which = key.partition(".mlp.experts.")
        block = f"blk.{layer.rpartition('.')[2]}"
        if experts and which == "gate_up_proj":
            stored[f"{block}.ffn_gate_exps.weight"], stored[f"{block}.ffn_up_exps.weight"] = value.chunk(2, dim=1)
        elif experts:
            stored[f"{block}.ffn_down_exps.weight"] = value
        elif not (key == "lm_head.weight" and settings.tie_word_embeddings):
            base, suffix = key.rsplit(".", 1)
            stored[f"{names.get_name(base)}.{suffix}"] = _stored(key, value, settings, name)
    return {key: value.contiguous().numpy() for key, value in stored.items()}


def _stored(key: str, value: torch.Tensor, settings, name: str) -> torch.Tensor:
    heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}.get(key.split(".")[-2])
    if name == "llama" and heads:
        return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
    if name == "gemma3" and "norm" in key:
        return value + 1
    return value[0] if "shared_expert_gate" in key else value


def write(
    path: Path, built: tf.PreTrainedModel, name: str, kind: Type = Type.F32, change=None, extra=None, drop=()
) -> Path:
    """Write a model of architecture `name` to `path`; returns `path`.

    kind    type of its matrices
    change  called with the dictionary of tensors before they are written
    extra   called with the GGUFWriter, to add metadata
    drop    metadata keys to leave out
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURE[name])
    settings, prefix = built.config, ARCHITECTURE[name]
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if name == "llama":
        writer.add_rope_dimension_count(head_dim)
    if name == "gemma3":
        writer.add_rope_freq_base(settings.rope_parameters["full_attention"]["rope_theta"])
        writer.add_sliding_window(settings.sliding_window)
        writer.add_array(
            f"{prefix}.attention.sliding_window_pattern", [t == "sliding_attention" for t in settings.layer_types]
        )
    else:
        writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    if "moe" in name:
        writer.add_expert_count(settings.num_experts)
        writer.add_expert_used_count(settings.num_experts_per_tok)
        writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if name == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)
    _add_tokenizer(writer)
    if extra is not None:
        extra(writer)
    for key in drop:
        del writer.kv_data[0][key]
    values = tensors(built, name)
    if change is not None:
        change(values)
    for key, value in values.items():
        if value.ndim > 1 and kind != Type.F32 and "ffn_gate_inp" not in key:
            writer.add_tensor(key, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_pad_token_id(SPECIAL.index("<pad>"))
    writer.add_bos_token_id(SPECIAL.index("<bos>"))
    writer.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    writer.add_unk_token_id(SPECIAL.index("<unk>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
