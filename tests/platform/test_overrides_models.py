# SPDX-License-Identifier: BSD-3-Clause
"""Kernels of layers and models in torch, against vLLM's own torch versions or loops."""

import pytest
import torch

from vllm_superl8.platform.triton_overrides import models


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def default_vllm_config():
    """The setting in which vLLM's layers can be made."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_is_vllms_own(generator, default_vllm_config, interleaved, is_neox):
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    section = [10, 12, 10] if interleaved else [8, 12, 12]  # of 32 pairs
    rope = MRotaryEmbedding(80, 64, 128, 10000.0, is_neox, torch.float32, section, interleaved)
    positions = torch.randint(0, 100, (3, 5), generator=generator)
    q, k = torch.randn(5, 3 * 80, generator=generator), torch.randn(5, 80, generator=generator)
    want = rope.forward_native(positions, q.clone(), k.clone())
    cos, sin = rope.cos_sin_cache[positions].chunk(2, -1)
    models.mrope(q, k, cos, sin, 5, 240, 80, 3, 1, 80, 64, 4, 1, 64, *section, interleaved, is_neox, num_warps=4)
    for got, wanted in zip((q, k), want, strict=True):
        assert (got - wanted).abs().max() < 1e-5
        assert (wanted.abs().max() > 1).all()


def test_gemma4_routing_is_vllms_own(generator):
    from vllm.model_executor.models.gemma4 import gemma4_routing_function_torch

    gating, scales = torch.randn(4, 16, generator=generator), torch.rand(16, generator=generator)
    weights, ids = torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int32)
    models.gemma4_routing(gating, scales, weights, ids, 16, 3, 16, num_warps=1)
    want_weights, want_ids = gemma4_routing_function_torch(gating, 3, scales)
    assert torch.equal(ids.long(), want_ids.long())
    assert (weights - want_weights).abs().max() < 1e-6


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("unpadded", [None, 2])
def test_eplb_maps_to_replicas_and_counts(enabled, unpadded):
    topk_ids = ints([[0, 1], [2, -1], [1, 1]])
    replicas = ints([1, 2, 1], torch.int64)
    physical = ints([[0, -1], [1, 3], [2, -1]], torch.int64)
    want, load = [], [0] * 4
    for token, choices in enumerate(topk_ids.tolist()):
        for logical in choices:
            replica = (token * 2654435769 % 2**32) % int(replicas[logical])
            expert = -1 if logical < 0 else int(physical[logical, replica])
            want.append(expert)
            if enabled and expert >= 0 and (unpadded is None or token < unpadded):
                load[expert] += 1
    out, counts = torch.full((6,), -9, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    models.eplb_map_and_record(
        topk_ids, replicas, physical, out, counts, torch.tensor([enabled]),
        None if unpadded is None else ints([unpadded]), 3, 2, 4, 6, 2, unpadded is not None, 256,
    )  # fmt: skip
    assert out.tolist() == want and counts.tolist() == load


def test_swiglustep_and_mm_input_norm_are_vllms_own(generator, default_vllm_config):
    from vllm.model_executor.layers.activation import SwigluStepAndMul

    x = torch.randn(3, 16, generator=generator) * 4
    out = torch.empty(3, 8)
    models.swiglustep_and_mul(out, 8, x, 16, limit=1.5, d=8, BLOCK_SIZE=1024)
    assert (out - SwigluStepAndMul(1.5).forward_native(x)).abs().max() < 1e-6

    pixels = torch.randint(0, 256, (2, 3, 5), generator=generator, dtype=torch.uint8)
    weight, bias = torch.rand(3, generator=generator), torch.rand(3, generator=generator)
    out = torch.empty(2, 3, 5, dtype=torch.float16)
    models.mm_input_norm(pixels, out, weight, bias, 30, 5, C=3, BLOCK=1024, num_warps=4)
    assert (
        out - (pixels * weight[None, :, None] + bias[None, :, None])
    ).abs().max() < 0.07  # half a step of fp16 at 256
