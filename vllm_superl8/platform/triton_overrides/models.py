# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels of vLLM's layers and models that run on CUDA in eager mode and have no other way around."""

import torch

from vllm_superl8 import ops


def mrope(
    q_ptr, k_ptr, cos, sin, num_tokens, q_token_stride, k_token_stride, n_qh, n_kh, hd, rd, pad_n_qh, pad_n_kh, pad_rd,
    mrope_section_t, mrope_section_h, mrope_section_w, is_interleaved, is_neox_style, num_warps=None,
):  # fmt: skip
    """Rotate q and k in place by angles that come from the time, height or width position, by channel.

    cos, sin (3, num_tokens, rd / 2). Sections follow each other, or alternate T H W T H W .. until one is used up.
    """
    channels = torch.arange(rd // 2, device=cos.device)
    if is_interleaved:
        of_height = (channels % 3 == 1) & (channels < 3 * mrope_section_h)
        of_width = (channels % 3 == 2) & (channels < 3 * mrope_section_w)
    else:
        of_width = channels >= mrope_section_t + mrope_section_h
        of_height = (channels >= mrope_section_t) & ~of_width
    picked = [torch.where(of_width, v[2], torch.where(of_height, v[1], v[0])) for v in (cos, sin)]
    cache = torch.cat(picked, -1)  # (tokens, rd): each token has its own row
    rows = torch.arange(num_tokens, device=cos.device)
    ops.rotary_embedding(rows, q_ptr, k_ptr, hd, cache, is_neox_style)


def swiglustep_and_mul(o_ptr, o_stride, x_ptr, x_stride, limit, d, BLOCK_SIZE=None):
    ops.act_and_mul(o_ptr, x_ptr, "swiglustep", limit)


def gemma4_routing(
    gating_ptr, per_expert_scale_ptr, topk_weights_ptr, topk_ids_ptr, E, K, BLOCK_E=None, num_warps=None
):
    """The K largest logits' softmax among themselves, times their experts' scales."""
    ops.topk_routing(topk_weights_ptr, topk_ids_ptr, None, gating_ptr, "softmax", True)
    topk_weights_ptr *= per_expert_scale_ptr[topk_ids_ptr.long()]


def eplb_map_and_record(
    topk_ids_ptr, logical_replica_count_ptr, logical_to_physical_ptr, out_ids_ptr, out_ptr, record_enabled_ptr,
    num_unpadded_tokens_ptr, num_logical_experts, map_slots, out_size, numel, num_active_experts,
    HAS_NUM_UNPADDED=False, BLOCK_SIZE=None,
):  # fmt: skip
    """Physical expert of each logical one, its replica by a hash of the token; loads are counted if that is enabled."""
    logical = topk_ids_ptr.view(-1).long()
    valid = (logical >= 0) & (logical < num_logical_experts)
    safe = torch.where(valid, logical, 0)
    tokens = torch.arange(numel, device=logical.device) // num_active_experts
    hashed = (tokens * 2654435769) & 0xFFFFFFFF  # Knuth's multiplicative hash
    replica = hashed % logical_replica_count_ptr[safe].long().clamp_min(1)
    physical = torch.where(valid, logical_to_physical_ptr[safe, replica].long(), -1)
    out_ids_ptr.copy_(physical)
    counted = (physical >= 0) & (physical < out_size) & (record_enabled_ptr.view(-1)[0] != 0)
    if HAS_NUM_UNPADDED:
        counted &= tokens < num_unpadded_tokens_ptr.view(-1)[0]
    out_ptr.scatter_add_(0, torch.where(counted, physical, 0), counted.to(out_ptr.dtype))


def mm_input_norm(x_ptr, y_ptr, w_ptr, b_ptr, numel, L, C, BLOCK=None, num_warps=None):
    """Scale and shift by channel: x, y (N, C, L); computed in float32."""
    y_ptr.copy_(x_ptr.float() * w_ptr.float().view(-1, 1) + b_ptr.float().view(-1, 1))


OVERRIDES = {
    "layers.rotary_embedding.mrope._triton_mrope_forward": mrope,
    "layers.activation._swiglustep_and_mul_kernel": swiglustep_and_mul,
    "layers.fusion.mm_input_norm._fused_mm_input_norm_kernel": mm_input_norm,
    "layers.fused_moe.router.base_router._eplb_map_and_record_i32_kernel": eplb_map_and_record,
    "models.gemma4._gemma4_routing_kernel": gemma4_routing,
}
"""Kernel path below vllm.model_executor -> function."""
