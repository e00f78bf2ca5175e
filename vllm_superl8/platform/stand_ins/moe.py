# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the namespace _moe_C: routing, and the sorting that vLLM's Triton experts and LoRA need."""

import torch

from vllm_superl8 import ops
from vllm_superl8.platform.stand_ins import library

_OUTPUTS = "Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) token_expert, Tensor gating, bool renormalize"


def define(device: str) -> None:
    """Define what vLLM calls; the same on "cpu" and "cuda"."""
    library.define(
        "_moe_C", f"topk_softmax({_OUTPUTS}, Tensor? bias=None, Tensor? is_padding=None) -> ()", _topk_softmax
    )
    library.define(
        "_moe_C",
        f"topk_sigmoid({_OUTPUTS}, Tensor? bias=None, float scale=1.0, Tensor? is_padding=None) -> ()",
        _topk_sigmoid,
    )
    library.define(
        "_moe_C",
        f"topk_softplus_sqrt({_OUTPUTS}, float scale, Tensor? bias=None, Tensor? input_tokens=None, Tensor? "
        "hash_table=None, Tensor? is_padding=None, Tensor? bias_vl=None, int image_sentinel_lo=0) -> ()",
        _topk_softplus_sqrt,
    )
    library.define(
        "_moe_C",
        "grouped_topk(Tensor scores, int num_groups, int topk_group, int topk, bool renormalize, float scale, Tensor "
        "bias, int scoring=0) -> (Tensor, Tensor)",
        _grouped_topk,
        fake=None,
    )
    library.define(
        "_moe_C",
        "moe_sum(Tensor x, Tensor(a!) out, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
        _moe_sum,
    )
    library.define(
        "_moe_C",
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_ids, Tensor(b!) "
        "expert_ids, Tensor(c!) num_tokens_post_pad, Tensor? expert_map=None, Tensor(d!)? scatter_idx=None) -> ()",
        ops.moe_align,
    )
    library.define(
        "_moe_C",
        "moe_lora_align_block_size(Tensor topk_ids, Tensor token_lora_mapping, int num_experts, int block_size, int "
        "max_loras, int max_num_tokens_padded, int max_num_m_blocks, Tensor(a!) sorted_ids, Tensor(b!) expert_ids, "
        "Tensor(c!) num_tokens_post_pad, Tensor adapter_enabled, Tensor lora_ids, Tensor? expert_map=None) -> ()",
        _moe_lora_align_block_size,
    )


def _topk_softmax(weights, ids, token_expert, gating, renormalize, bias=None, is_padding=None):
    ops.topk_routing(weights, ids, token_expert, gating, "softmax", renormalize, 1.0, bias, is_padding)


def _topk_sigmoid(weights, ids, token_expert, gating, renormalize, bias=None, scale=1.0, is_padding=None):
    ops.topk_routing(weights, ids, token_expert, gating, "sigmoid", renormalize, scale, bias, is_padding)


def _topk_softplus_sqrt(
    weights, ids, token_expert, gating, renormalize, scale, bias=None, input_tokens=None, hash_table=None,
    is_padding=None, bias_vl=None, image_sentinel_lo=0,
):  # fmt: skip
    ops.topk_routing(
        weights, ids, token_expert, gating, "sqrt_softplus", renormalize, scale, bias, is_padding,
        tokens_in=input_tokens, hash_table=hash_table, image_bias=bias_vl, image_sentinel=image_sentinel_lo,
    )  # fmt: skip


def _grouped_topk_outputs(scores, num_groups, topk_group, topk, *_, **__):
    shape = (scores.shape[0], topk)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)


def _grouped_topk(scores, num_groups, topk_group, topk, renormalize, scale, bias, scoring=0):
    weights, ids = _grouped_topk_outputs(scores, num_groups, topk_group, topk)
    how = ("none", "sigmoid")[scoring]
    ops.topk_routing(weights, ids, None, scores, how, renormalize, scale, bias, None, num_groups, topk_group)
    return weights, ids


def _moe_sum(x, out, topk_ids=None, expert_map=None):
    """out (tokens, n) = sum of x (tokens, topk, n) over the choices whose expert takes part on this rank."""
    if topk_ids is not None:
        here = topk_ids >= 0
        if expert_map is not None:
            here &= expert_map[topk_ids.long().clamp_min(0)] >= 0
        x = torch.where(here.unsqueeze(-1), x, 0)
    torch.sum(x, 1, out=out)


def _moe_lora_align_block_size(
    topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded, max_num_m_blocks,
    sorted_ids, expert_ids, num_tokens_post_pad, adapter_enabled, lora_ids, expert_map=None,
):  # fmt: skip
    if sorted_ids.numel() != max_loras * max_num_tokens_padded or expert_ids.numel() != max_loras * max_num_m_blocks:
        raise ValueError(
            f"moe_lora_align_block_size: outputs of {sorted_ids.numel()} and {expert_ids.numel()} do not fit "
            f"{max_loras} adapters of {max_num_tokens_padded} tokens and {max_num_m_blocks} blocks"
        )
    ops.moe_align(
        topk_ids, num_experts, block_size, sorted_ids, expert_ids, num_tokens_post_pad, expert_map,
        token_adapter=token_lora_mapping, adapters=lora_ids, adapter_enabled=adapter_enabled,
    )  # fmt: skip
