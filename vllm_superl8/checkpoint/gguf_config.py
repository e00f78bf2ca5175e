# SPDX-License-Identifier: BSD-3-Clause
"""A transformers configuration from the metadata of a GGUF file, one row an architecture.

transformers' own conversion (load_gguf_checkpoint, 5.20) reads the whole vocabulary through GGUFReader, a minute for
262144 tokens, and leaves out what this file states explicitly: rope scaling, head_dim of some families, Gemma's
window pattern and attention scale, Mixture-of-Experts widths, ends of turn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_superl8.checkpoint.gguf_header import Header
from vllm_superl8.checkpoint.gguf_metadata import Metadata
from vllm_superl8.checkpoint.gguf_rope import rope_parameters


@dataclass(frozen=True)
class Architecture:
    """How one value of general.architecture is served.

    model_type    transformers' name
    extra         (Metadata) -> what the family has beside the common fields
    rotary_pairs  llama.cpp stores the rows of q and k so that the two of a rotary pair are neighbours
    """

    model_type: str
    extra: Callable[[Metadata], dict[str, Any]]
    rotary_pairs: bool = False


def config_dict(header: Header) -> dict[str, Any]:
    """config.json of the model, in transformers' words.

    Raises ValueError, in one line that names the file and the key or tensor, for an architecture that is not served
    and for metadata that is missing, impossible or contradicts the tensors.
    """
    architecture = architecture_of(header)
    fields = Metadata(header)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        "model_type": architecture.model_type,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type]],
        **_decoder(fields),
        **architecture.extra(fields),
        **fields.token_ids(),
        "dtype": str(_dtype(header)).removeprefix("torch."),
    }


def hf_config(header: Header, config: dict[str, Any]) -> Any:
    """transformers' configuration object for a config_dict, with its defaults where the file says nothing.

    Raises ValueError naming the file where transformers refuses a value.
    """
    from transformers import AutoConfig

    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(config["model_type"], **fields)
    except Exception as error:  # its validators raise several kinds
        why = str(error.__cause__ or error).replace("\n", " ")
        raise ValueError(f"{header.path}: transformers refuses its configuration: {why}") from error


def architecture_of(header: Header) -> Architecture:
    """The row of the table for this file."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{header.path}: GGUF architecture {name!r} is not served; superl8 serves {', '.join(ARCHITECTURES)}. "
            "Take the model as a Hugging Face checkpoint instead"
        )
    return ARCHITECTURES[name]


def _decoder(fields: Metadata) -> dict[str, Any]:
    """Fields that every decoder has."""
    embedding = fields.tensor("token_embd.weight")
    hidden, layers = fields.count("embedding_length"), fields.count("block_count")
    heads = fields.count("attention.head_count")
    if embedding.shape[1:] != (hidden,):
        fields.refuse(f"tensor token_embd.weight has shape {list(embedding.shape)}, embedding_length is {hidden}")
    if fields.blocks != set(range(layers)):
        fields.refuse(f"block_count is {layers} but the file has tensors of {len(fields.blocks)} blocks")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(fields, hidden, heads),
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(fields),
        "tie_word_embeddings": not fields.has("output.weight"),
    }


def _head_dim(fields: Metadata, hidden: int, heads: int) -> int:
    if hidden % heads and not fields.stated("attention.key_length"):
        fields.refuse(f"embedding_length {hidden} is not a multiple of attention.head_count {heads}")
    head_dim = fields.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (length := fields.count(key, head_dim)) != head_dim:
            fields.refuse(f"{key} is {length} and the size of a head {head_dim}; only equal ones are served")
    return head_dim


def _dtype(header: Header) -> torch.dtype:
    """What the 16-bit tensors of the file are in, bfloat16 where there are none."""
    types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return torch.float16 if "F16" in types and "BF16" not in types else torch.bfloat16


def _llama(fields: Metadata) -> dict[str, Any]:
    if fields.count("expert_count", 0, smallest=0):
        fields.refuse("Mixtral experts are not served from GGUF; take the Hugging Face checkpoint")
    return {
        "attention_bias": fields.has("blk.0.attn_q.bias"),
        "mlp_bias": fields.has("blk.0.ffn_gate.bias"),
    }


def _qwen2(fields: Metadata) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(fields: Metadata) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": fields.has("blk.0.attn_q.bias")}


def _experts(fields: Metadata) -> dict[str, Any]:
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(fields: Metadata) -> dict[str, Any]:
    shared = fields.count("expert_shared_feed_forward_length")
    return _qwen2(fields) | _experts(fields) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(fields: Metadata) -> dict[str, Any]:
    return _qwen3(fields) | _experts(fields) | {"norm_topk_prob": True}


def _gemma3(fields: Metadata) -> dict[str, Any]:
    """Five layers with a window and a small rope base, then one without.

    Attention is scaled by head_dim, in the 27B model (62 layers) by hidden_size / heads: the file does not say it,
    llama.cpp knows it by the number of layers as well.
    """
    layers, heads = fields.count("block_count"), fields.count("attention.head_count")
    hidden = fields.count("embedding_length")
    per_head = hidden // heads
    pattern = fields.values.get(f"{fields.architecture}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        sliding = [bool(value) for value in pattern]
    else:
        period = fields.count("attention.sliding_window_pattern", 6)
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(sliding) != layers:
        fields.refuse(f"attention.sliding_window_pattern has {len(sliding)} values for {layers} layers")
    full = rope_parameters(fields, default_theta=1e6)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 1e4)}
    softcaps = {
        name: fields.number(key)
        for name, key in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        )
        if fields.stated(key)
    }
    return {
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sliding],
        "query_pre_attn_scalar": per_head if layers == 62 else _head_dim(fields, hidden, heads),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "hidden_activation": "gelu_pytorch_tanh",
        **softcaps,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, rotary_pairs=True),
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma3": Architecture("gemma3_text", _gemma3),
}
"""general.architecture to how it is served."""


def generation_dict(header: Header) -> dict[str, Any]:
    """generation_config.json: where text ends, and the sampling defaults that the model's authors gave, if any."""
    fields = Metadata(header)
    sampling = {
        name: header.metadata[f"general.sampling.{key}"]
        for name, key in SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            fields.refuse(f"general.sampling.{SAMPLING[name]} is {value!r}, a number was expected")
    return {
        **fields.token_ids(),
        "eos_token_id": fields.end_ids(),
        **({"do_sample": True} if sampling else {}),
        **sampling,
    }


SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of generation_config.json to keys under general.sampling."""
