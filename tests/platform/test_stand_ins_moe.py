# SPDX-License-Identifier: BSD-3-Clause
"""Operators of _moe_C, called as vLLM calls them, against its torch versions and its documentation."""

import pytest
import torch

from vllm_superl8.platform import stand_ins

stand_ins.install("cpu")
from vllm import _custom_ops as ops  # noqa: E402  (the stand-ins come first)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing_is_vllms_own(generator, scoring, has_bias):
    """Against the torch code that vLLM runs where it has no kernel."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    logits, hidden = torch.randn(6, 16, generator=generator), torch.zeros(6, 4)
    bias = torch.randn(16, generator=generator)
    if has_bias:
        weights, ids = fused_topk_bias(hidden, logits, scoring, bias, 4, True, routed_scaling_factor=2.5)
    else:
        weights, ids, _ = fused_topk(hidden, logits, 4, True, scoring_func=scoring)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    want_ids = (scores + bias if has_bias else scores).topk(4).indices
    want = scores.gather(1, want_ids)
    want = want / want.sum(-1, keepdim=True) * (2.5 if has_bias else 1.0)
    assert torch.equal(ids.long(), want_ids)
    assert (weights - want).abs().max() < 1e-6


def test_sqrt_softplus_routing_is_vllms_own(generator):
    logits, bias = torch.randn(6, 16, generator=generator), torch.randn(16, generator=generator)
    weights, ids = torch.empty(6, 4), torch.empty(6, 4, dtype=torch.int32)
    ops.topk_hash_softplus_sqrt(weights, ids, torch.empty_like(ids), logits, True, 1.5, bias)
    scores = torch.nn.functional.softplus(logits).sqrt()
    want_ids = (scores + bias).topk(4).indices
    want = scores.gather(1, want_ids)
    assert torch.equal(ids.long(), want_ids)
    assert (weights - want / want.sum(-1, keepdim=True) * 1.5).abs().max() < 1e-6


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_routing_is_vllms_own(generator, scoring):
    from vllm.model_executor.layers.fused_moe.router.cpu_router import _grouped_topk

    logits, bias = torch.randn(5, 32, generator=generator), torch.randn(32, generator=generator)
    want_weights, want_ids = _grouped_topk(logits, 4, True, 8, 3, scoring, 2.5, bias)
    scores = logits.softmax(-1) if scoring == "softmax" else logits
    weights, ids = torch.ops._moe_C.grouped_topk(scores, 8, 3, 4, True, 2.5, bias, int(scoring == "sigmoid"))
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    assert (weights.gather(1, order) - want_weights.gather(1, want_order)).abs().max() < 1e-6


def test_moe_sum_leaves_out_experts_of_other_ranks(generator):
    x, out = torch.randn(3, 2, 4, generator=generator).half(), torch.empty(3, 4).half()
    ops.moe_sum(x, out)
    assert (out.float() - x.float().sum(1)).abs().max() < 2e-3
    x[0, 1] = x[2, 0] = float("nan")  # never written by the experts
    ops.moe_sum(x, out, torch.tensor([[0, 1], [0, 0], [-1, 0]]), torch.tensor([0, -1], dtype=torch.int32))
    want = torch.stack([x[0, 0].float(), x[1].float().sum(0), x[2, 1].float()])
    assert (out.float() - want).abs().max() < 2e-3


@pytest.mark.parametrize("ignores_invalid", [False, True])
def test_moe_alignment_is_what_vllm_documents(ignores_invalid):
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    topk_ids = torch.tensor([[2, 3], [1, 2], [1, 3], [1, 2]])
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    got = moe_align_block_size(topk_ids, 4, 4, expert_map, False, ignores_invalid)
    if ignores_invalid:  # expert 2 takes no part
        assert got[0][:8].tolist() == [2, 4, 6, 8, 1, 5, 8, 8]
        assert got[1][:2].tolist() == [0, 1] and got[2].item() == 8
        scatter = moe_align_block_size(topk_ids, 4, 4, expert_map, False, True, return_scatter_idx=True)[3]
        assert scatter.flatten().tolist() == [-1, 1, 2, -1, 4, 5, 6, -1]
    else:  # it does, and its block is marked
        assert got[0][:12].tolist() == [2, 4, 6, 8, 0, 3, 7, 8, 1, 5, 8, 8]
        assert got[1][:3].tolist() == [0, -1, 1] and got[2].item() == 12


def test_moe_lora_alignment_keeps_adapters_apart():
    ids = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32)
    numbers, blocks = 6 + 2 * 3, 3
    outs = [torch.full((2 * n,), -7, dtype=torch.int32) for n in (numbers, blocks, 1)]
    ops.moe_lora_align_block_size(
        ids, torch.tensor([1, -1, 1], dtype=torch.int32), 2, 4, 2, numbers, blocks, *outs,
        torch.tensor([1, 1, 0], dtype=torch.int32), torch.tensor([1, -1, -1], dtype=torch.int32), None,
    )  # fmt: skip
    assert outs[0][:numbers].tolist() == [-7] * numbers  # adapter 0 is not in the batch
    assert outs[0][numbers:].tolist() == [0, 6, 6, 6, 1, 4, 5, 6] + [6] * 4
    assert outs[1].tolist() == [-7] * 3 + [0, 1, -1] and outs[2].tolist() == [-7, 8]
