# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the namespace _moe_C: routing, and the sorting that vLLM's Triton experts and LoRA need.

All are made of torch ops that keep their shapes, so that CUDA graphs hold them.
"""

import torch
import torch.nn.functional as F

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
        _grouped_topk_fake,
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
        _moe_align_block_size,
    )


def _choose(weights, ids, token_expert, scores, renormalize, bias, scale, is_padding):
    """The topk best of scores + bias (tokens, experts), weighted by scores alone."""
    topk = weights.shape[1]
    ranked = scores if bias is None else scores + bias.float()
    chosen = ranked.topk(topk, dim=-1).indices
    value = scores.gather(1, chosen)
    if renormalize:
        value = value / value.sum(-1, keepdim=True).clamp_min(1e-20)
    value = value * scale
    if is_padding is not None:
        value = value.masked_fill(is_padding.view(-1, 1), 0.0)
        chosen = chosen.masked_fill(is_padding.view(-1, 1), -1)
    weights.copy_(value)
    ids.copy_(chosen)
    tokens = scores.shape[0]
    rows = torch.arange(tokens, device=scores.device)[:, None]
    token_expert.copy_(rows + tokens * torch.arange(topk, device=scores.device))


def _topk_softmax(weights, ids, token_expert, gating, renormalize, bias=None, is_padding=None):
    _choose(weights, ids, token_expert, gating.float().softmax(-1), renormalize, bias, 1.0, is_padding)


def _topk_sigmoid(weights, ids, token_expert, gating, renormalize, bias=None, scale=1.0, is_padding=None):
    _choose(weights, ids, token_expert, gating.float().sigmoid(), renormalize, bias, scale, is_padding)


def _topk_softplus_sqrt(
    weights, ids, token_expert, gating, renormalize, scale, bias=None, input_tokens=None, hash_table=None,
    is_padding=None, bias_vl=None, image_sentinel_lo=0,
):  # fmt: skip
    if hash_table is not None or bias_vl is not None:
        raise ValueError("topk_softplus_sqrt: hash routing and vision biases are not served")
    scores = F.softplus(gating.float()).sqrt()
    _choose(weights, ids, token_expert, scores, renormalize, bias, scale, is_padding)


def _grouped_topk(scores, num_groups, topk_group, topk, renormalize, scale, bias, scoring=0):
    """DeepSeek-V3 routing: groups ranked by their two best experts, then the topk of the best groups."""
    scores = scores.float().sigmoid() if scoring == 1 else scores.float()
    tokens, experts = scores.shape
    ranked = (scores + bias.float()).view(tokens, num_groups, -1)
    group_score = ranked.topk(min(2, ranked.shape[-1]), dim=-1).values.sum(-1)
    best = group_score.topk(topk_group, dim=-1).indices
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
    ranked = ranked.masked_fill(~kept.unsqueeze(-1), -torch.inf).view(tokens, experts)
    chosen = ranked.topk(topk, dim=-1).indices
    value = scores.gather(1, chosen)
    if renormalize:
        value = value / value.sum(-1, keepdim=True).clamp_min(1e-20)
    return value * scale, chosen.int()


def _grouped_topk_fake(scores, num_groups, topk_group, topk, *_):
    shape = (scores.shape[0], topk)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)


def _moe_sum(x, out, topk_ids=None, expert_map=None):
    """out (tokens, n) = sum of x (tokens, topk, n) over the experts of this rank."""
    if topk_ids is not None and expert_map is not None:
        here = expert_map[topk_ids.long().clamp_min(0)] >= 0
        x = torch.where(here.unsqueeze(-1), x, 0)
    out.copy_(x.sum(1, dtype=torch.float32))


def _moe_align_block_size(
    topk_ids, num_experts, block_size, sorted_ids, expert_ids, num_tokens_post_pad, expert_map=None, scatter_idx=None
):
    """Order (token, choice) numbers by expert, each expert padded to whole blocks.

    sorted_ids gets the numbers, and topk_ids.numel() in its padding; expert_ids the expert of each block (through
    expert_map; -1 for other ranks' experts and unused blocks); scatter_idx the place of each number.
    """
    flat = topk_ids.flatten().long()
    total = flat.numel()
    valid = (flat >= 0) & (flat < num_experts)
    key = torch.where(valid, flat, num_experts)  # experts of nobody go last and are dropped
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=flat.device).scatter_add_(
        0, key, torch.ones_like(key)
    )
    padded = (counts[:num_experts] + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = key.argsort(stable=True)
    first_of = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[:-1]
    rank = torch.arange(total, device=flat.device) - first_of[key[order]]
    starts = torch.cat([ends - padded, ends[-1:]])
    place = starts[key[order]] + rank
    place = torch.where(valid[order], place, sorted_ids.numel())
    spare = sorted_ids.new_full((sorted_ids.numel() + 1,), total)
    sorted_ids.copy_(spare.scatter_(0, place.clamp_max(sorted_ids.numel()), order.to(sorted_ids.dtype))[:-1])
    if scatter_idx is not None:
        scatter_idx.view(-1).scatter_(0, order, place.to(scatter_idx.dtype))
    num_tokens_post_pad.copy_(ends[-1:])
    block_start = torch.arange(expert_ids.numel(), device=flat.device) * block_size
    expert = torch.searchsorted(ends, block_start, right=True)
    used = expert < num_experts
    expert = expert.clamp_max(num_experts - 1)
    if expert_map is not None:
        expert = expert_map[expert].long()
    expert_ids.copy_(torch.where(used, expert, -1))
