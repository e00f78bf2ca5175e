# SPDX-License-Identifier: BSD-3-Clause
"""moe_align, against a loop."""

import pytest
import torch

from vllm_superl8.ops import align  # noqa: F401  registers the op
from vllm_superl8.ops.registry import OPS


def loop(experts, num_experts, tile, length, tiles):
    """Sorted numbers, expert of each tile and padded total; experts: of each number, None where it takes no part."""
    sorted_ids, expert_ids = [], []
    for expert in range(num_experts):
        own = [number for number, e in enumerate(experts) if e == expert]
        while len(own) % tile:
            own.append(len(experts))
        sorted_ids += own
        expert_ids += [expert] * (len(own) // tile)
    total = len(sorted_ids)
    return sorted_ids + [len(experts)] * (length - total), expert_ids + [-1] * (tiles - len(expert_ids)), total


def sizes(numbers, experts, tile):
    length = numbers + experts * (tile - 1)
    if numbers < experts:
        length = min(length, numbers * tile)
    return length, -(-length // tile)


def empty(*shape, device):
    return torch.empty(*shape, dtype=torch.int32, device=device)


def runs(kernels):
    return (kernels.run, lambda op, *args: OPS[op].reference(*args))


# tokens, topk, experts, tile: a warp walks 32 numbers at a time, eight warps share them
SHAPES = [(0, 2, 4, 4), (1, 1, 1, 1), (3, 2, 40, 16), (16, 2, 8, 4), (11, 3, 4, 8), (129, 2, 5, 16), (70, 8, 130, 16)]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "topk", "experts", "tile"), SHAPES)
@pytest.mark.parametrize("has_map", [False, True])
def test_moe_align_sorts_by_expert(kernels, tokens, topk, experts, tile, has_map, ids_dtype):
    generator = torch.Generator().manual_seed(tokens)
    topk_ids = torch.randint(-1, experts + 1, (tokens, topk), generator=generator).to(kernels.device, ids_dtype)
    expert_map = torch.tensor([e // 2 if e % 2 else -1 for e in range(experts)], dtype=torch.int32)
    local = [e if 0 <= e < experts else None for e in topk_ids.flatten().tolist()]
    if has_map:
        local = [None if e is None or expert_map[e] < 0 else int(expert_map[e]) for e in local]
    length, tiles = sizes(tokens * topk, experts, tile)
    want_sorted, want_experts, want_total = loop(local, experts, tile, length, tiles)
    for run in runs(kernels):
        outs = [
            empty(length, device=kernels.device),
            empty(tiles, device=kernels.device),
            empty(1, device=kernels.device),
        ]
        scatter = empty(tokens * topk, 1, device=kernels.device)
        run("moe_align", topk_ids, experts, tile, *outs, expert_map.to(kernels.device) if has_map else None, scatter)
        assert outs[0].tolist() == want_sorted
        assert outs[1].tolist() == want_experts
        assert outs[2].tolist() == [want_total]
        assert scatter.flatten().tolist() == [-1 if e is None else number for number, e in enumerate(local)]


@pytest.mark.parametrize("tokens", [1, 40])
def test_moe_align_keeps_adapters_apart(kernels, tokens):
    topk, experts, tile, num_adapters = 2, 6, 4, 3
    generator = torch.Generator().manual_seed(tokens)
    topk_ids = torch.randint(0, experts, (tokens, topk), generator=generator).to(kernels.device)
    token_adapter = torch.randint(-1, num_adapters, (tokens,), generator=generator, dtype=torch.int32).to(
        kernels.device
    )
    adapters = torch.tensor([-1, 2, 0, 1], dtype=torch.int32, device=kernels.device)
    enabled = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=kernels.device)
    length, tiles = sizes(tokens * topk, experts, tile)
    for run in runs(kernels):
        outs = [
            torch.full((num_adapters * n,), -7, dtype=torch.int32, device=kernels.device) for n in (length, tiles, 1)
        ]
        run("moe_align", topk_ids, experts, tile, *outs, None, None, token_adapter, adapters, enabled)
        parts = [out.view(num_adapters, -1).tolist() for out in outs]
        for adapter in range(num_adapters):
            if adapter == 1:  # not enabled: left alone
                assert all(v == -7 for part in parts for v in part[adapter])
                continue
            owners = token_adapter.repeat_interleave(topk).tolist()
            local = [
                e if owner == adapter else None for e, owner in zip(topk_ids.flatten().tolist(), owners, strict=True)
            ]
            want = loop(local, experts, tile, length, tiles)
            assert (parts[0][adapter], parts[1][adapter], parts[2][adapter]) == (want[0], want[1], [want[2]])


def test_moe_align_refuses_what_does_not_fit(kernels):
    ids = torch.zeros(2, 2, dtype=torch.int64, device=kernels.device)
    outs = [empty(16, device=kernels.device), empty(4, device=kernels.device), empty(1, device=kernels.device)]
    with pytest.raises(ValueError, match=r"expert_ids is torch\.int64"):
        kernels.run("moe_align", ids, 4, 4, outs[0], outs[1].long(), outs[2])
    with pytest.raises(ValueError, match="token_adapter, adapters and adapter_enabled belong together"):
        kernels.run("moe_align", ids, 4, 4, *outs, None, None, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="got 4000 experts"):
        kernels.run("moe_align", ids, 4000, 4, *outs)
    with pytest.raises(ValueError, match=r"topk_ids are torch\.float32"):
        kernels.run("moe_align", ids.float(), 4, 4, *outs)
