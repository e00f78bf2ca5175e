# SPDX-License-Identifier: BSD-3-Clause
"""Sorting routed tokens by expert, padded to the tiles of a grouped GEMM such as vLLM's Triton one."""

import torch

from vllm_superl8.ops.registry import ptr, register, stream


def _check(topk_ids, sorted_ids, expert_ids, total, scatter_ids, token_adapter, adapters, adapter_enabled):
    given = [tensor is not None for tensor in (token_adapter, adapters, adapter_enabled)]
    if any(given) and not all(given):
        raise ValueError("moe_align: token_adapter, adapters and adapter_enabled belong together")
    outputs = {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "total": total, "scatter_ids": scatter_ids}
    for name, tensor in outputs.items():
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(f"moe_align: {name} is {tensor.dtype} with strides {tensor.stride()}, wanted dense int32")
        if tensor is not None and name != "scatter_ids" and tensor.numel() % total.numel():
            raise ValueError(f"moe_align: {name} has {tensor.numel()} elements for {total.numel()} adapters")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_align: topk_ids are {topk_ids.dtype}, wanted int32 or int64")


def _align_one(experts, num_experts, tile, sorted_ids, expert_ids, total):
    """experts (numbers): local expert of each number, or -1."""
    sorted_ids.fill_(experts.numel())
    expert_ids.fill_(-1)
    end = 0
    for expert in range(num_experts):
        numbers = (experts == expert).nonzero().flatten()
        sorted_ids[end : end + numbers.numel()] = numbers.to(sorted_ids.dtype)
        tiles = -(-numbers.numel() // tile)
        expert_ids[end // tile : end // tile + tiles] = expert
        end += tiles * tile
    total.fill_(end)


def moe_align_reference(
    topk_ids, num_experts, tile, sorted_ids, expert_ids, total, expert_map=None, scatter_ids=None, token_adapter=None,
    adapters=None, adapter_enabled=None,
):  # fmt: skip
    _check(topk_ids, sorted_ids, expert_ids, total, scatter_ids, token_adapter, adapters, adapter_enabled)
    experts = topk_ids.flatten().long()
    valid = (experts >= 0) & (experts < num_experts)
    if expert_map is not None:
        experts = expert_map[torch.where(valid, experts, 0)].long()
    experts = torch.where(valid, experts, -1)
    if scatter_ids is not None:
        numbers = torch.arange(experts.numel(), device=experts.device)
        scatter_ids.view(-1).copy_(torch.where(experts >= 0, numbers, -1))
    if token_adapter is None:
        _align_one(experts, num_experts, tile, sorted_ids, expert_ids, total)
        return
    parts = [tensor.view(total.numel(), -1) for tensor in (sorted_ids, expert_ids, total)]
    owner = token_adapter[: topk_ids.shape[0]].repeat_interleave(topk_ids.shape[1])
    for adapter in adapters.tolist():
        if 0 <= adapter < total.numel() and adapter_enabled[adapter]:
            own = torch.where(owner == adapter, experts, -1)
            _align_one(own, num_experts, tile, *(part[adapter] for part in parts))


def moe_align_kernel(
    module, topk_ids, num_experts, tile, sorted_ids, expert_ids, total, expert_map=None, scatter_ids=None,
    token_adapter=None, adapters=None, adapter_enabled=None,
):  # fmt: skip
    _check(topk_ids, sorted_ids, expert_ids, total, scatter_ids, token_adapter, adapters, adapter_enabled)
    topk_ids, num_adapters = topk_ids.contiguous(), total.numel()
    maps = [v if v is None else v.int().contiguous() for v in (expert_map, token_adapter, adapters, adapter_enabled)]
    module.moe_align(
        *map(ptr, (sorted_ids, expert_ids, total, scatter_ids, topk_ids, *maps)),
        1 if adapters is None else adapters.numel(), num_adapters, topk_ids.numel(), topk_ids.shape[-1], num_experts,
        tile, sorted_ids.numel() // num_adapters, expert_ids.numel() // num_adapters, -1,
        topk_ids.dtype == torch.int64, stream(topk_ids),
    )  # fmt: skip


moe_align = register(
    "moe_align",
    "(Tensor topk_ids, int num_experts, int tile, Tensor(a!) sorted_ids, Tensor(b!) expert_ids, Tensor(c!) total, "
    "Tensor? expert_map=None, Tensor(d!)? scatter_ids=None, Tensor? token_adapter=None, Tensor? adapters=None, "
    "Tensor? adapter_enabled=None) -> ()",
    reference=moe_align_reference,
    fake=lambda *_, **__: None,
    kernel=moe_align_kernel,
)
"""Order (token, choice) numbers by expert, each expert's padded to whole tiles.

topk_ids         (tokens, topk) int32 or int64; experts outside [0, num_experts) take no part
num_experts      at most 2048
sorted_ids       (length) int32: the numbers, expert after expert, ascending; tokens * topk in the padding.
                 length >= tokens * topk + num_experts * (tile - 1), or tokens * topk * tile if that is less
expert_ids       (ceil(length / tile)) int32: the expert of each tile, -1 after the last
total            (1) int32: numbers with their padding
expert_map       (num_experts) local number of each expert, which expert_ids then hold; -1 for experts of other ranks,
                 which take no part
scatter_ids      (tokens * topk) int32 or None: the number itself, -1 where its expert takes no part
token_adapter    (tokens) LoRA adapter of each token, -1 for none; then total has one element an adapter, sorted_ids and
                 expert_ids one part an adapter, and only those are written that adapters (any number; -1: none) names
                 and whose adapter_enabled is not 0

Raises ValueError for outputs that do not fit.
"""
