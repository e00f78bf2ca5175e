# SPDX-License-Identifier: BSD-3-Clause
"""Int8MoEMethod: routed experts against a dense reference, spread over ranks, with and without fused activation."""

from types import SimpleNamespace

import pytest
import torch

from vllm_superl8.platform import stand_ins

stand_ins.install("cpu")
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402  (the stand-ins come first)

from vllm_superl8.formats import int8  # noqa: E402
from vllm_superl8.quant import moe  # noqa: E402

from tolerances import Quality, relative_error  # noqa: E402

TOKENS, EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 21, 6, 3, 256, 128

# Both products' int8 activations (the bar of one is 40 dB), against the dequantised weights in float64.
# Measured: 37.8 to 38.5 dB.
BAR = Quality(cosine=0.9998, rel_l1=0.015, sqnr_db=36.0)


def data(*shape, seed):
    """Normal values with a mean, and outlier columns."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1
    x[..., ::64] *= 8
    return x


def routing():
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)])
    ids[0] = ids[1]  # two tokens with the same experts
    return torch.rand(TOKENS, TOPK, generator=generator), ids.int()


def made(group_size, activation=MoEActivation.SILU, *, experts=slice(None), expert_map=None, limit=None, columns=None):
    """(method, layer) with the experts `experts` of all, and with `columns` of their intermediate size."""
    settings = SimpleNamespace(
        has_bias=False, is_act_and_mul=True, swiglu_limit=limit, swiglu_alpha=None, swiglu_beta=None,
        activation_situ_beta=None, activation_situ_linear_beta=None,
    )  # fmt: skip
    method = moe.Int8MoEMethod(settings, group_size, "experts")
    gate, up = data(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=1)[experts].mul(0.05).chunk(2, 1)
    down = data(EXPERTS, HIDDEN, INTERMEDIATE, seed=2)[experts] * 0.05
    columns = slice(None) if columns is None else columns
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(torch.cat([gate[:, columns], up[:, columns]], 1), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(down[:, :, columns].contiguous(), requires_grad=False)
    layer.activation, layer.expert_map, layer.apply_router_weight_on_input = activation, expert_map, False
    method.process_weights_after_loading(layer)
    return method, layer


def applied(method, layer, x, weights, ids):
    return method.apply(layer, x, weights, ids, None, None)


def dense(layer, x, weights, ids, activation):
    """Every expert on every token, in float64, with the layer's own dequantised weights."""
    w13, w2 = (
        int8.dequantize(getattr(layer, f"{n}_weight"), getattr(layer, f"{n}_weight_scale")).double()
        for n in ("w13", "w2")
    )
    gate, up = (x.double() @ w13.mT).chunk(2, -1)
    out = activation(gate, up) @ w2.mT  # (experts, tokens, hidden)
    share = torch.zeros(len(x), EXPERTS, dtype=torch.float64).scatter_add_(1, ids.long(), weights.double())
    return torch.einsum("te,eth->th", share, out)


def silu(gate, up):
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("topk", [1, TOPK])
def test_int8_experts_match_a_dense_reference(group_size, topk):
    method, layer = made(group_size)
    x, (weights, ids) = data(TOKENS, HIDDEN, seed=0), routing()
    weights, ids = weights[:, :topk], ids[:, :topk]
    got = applied(method, layer, x, weights, ids)
    quality = Quality.of(got, dense(layer, x, weights, ids, silu))
    assert quality.meets(BAR), quality


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", moe.FUSED_ACTIVATIONS)
@pytest.mark.parametrize("group_size", [-1, 128])
def test_fused_activations_give_the_bits_of_separate_ones(monkeypatch, group_size, activation, dtype):
    method, layer = made(group_size, activation)
    x, routed = data(TOKENS, HIDDEN, seed=0).to(dtype), routing()
    fused = applied(method, layer, x, *routed)
    monkeypatch.setattr(moe, "FUSED_ACTIVATIONS", {})
    monkeypatch.setattr(moe, "act_and_mul_quantize", lambda *_, **__: pytest.fail("fused"))
    assert torch.equal(fused, applied(method, layer, x, *routed))


def test_clamped_activations_stay_clamped():
    method, layer = made(-1, limit=0.5)
    x, (weights, ids) = data(TOKENS, HIDDEN, seed=0), routing()
    want = dense(layer, x, weights, ids, lambda g, u: silu(g.clamp(max=0.5), u.clamp(-0.5, 0.5)))
    assert relative_error(want, dense(layer, x, weights, ids, silu)) > 0.1, "the limit must matter"
    # Clamped values are small and the limit sits among them: measured 33.5 dB, and 0 without the clamp.
    assert Quality.of(applied(method, layer, x, weights, ids), want).sqnr_db > 30


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_of_all_ranks_add_up_to_the_whole(ranks):
    x, routed = data(TOKENS, HIDDEN, seed=0), routing()
    whole = applied(*made(-1), x, *routed)
    local = EXPERTS // ranks
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
        own = slice(rank * local, (rank + 1) * local)
        total += applied(*made(-1, experts=own, expert_map=expert_map), x, *routed)
    assert relative_error(total, whole) < 1e-6


def test_a_rank_without_the_routed_experts_gives_zeros():
    expert_map = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32)
    method, layer = made(-1, experts=slice(0, 3), expert_map=expert_map)
    ids = torch.tensor([[3, 4], [5, 3]], dtype=torch.int32)
    got = applied(method, layer, data(2, HIDDEN, seed=0), torch.ones(2, 2), ids)
    assert (got == 0).all()


def test_slices_of_every_expert_add_up_to_the_whole():
    """Tensor parallelism: each rank quantises its own part of the intermediate columns."""
    x, (weights, ids) = data(TOKENS, HIDDEN, seed=0), routing()
    half = INTERMEDIATE // 2
    parts = [made(-1, columns=slice(i * half, (i + 1) * half)) for i in range(2)]
    total = sum(applied(method, layer, x, weights, ids) for method, layer in parts)
    want = sum(dense(layer, x, weights, ids, silu) for _, layer in parts)
    quality = Quality.of(total, want)
    assert quality.meets(BAR), quality


def test_experts_without_tokens_and_batches_without_rows_are_served():
    method, layer = made(-1)
    x = data(4, HIDDEN, seed=0)
    one = torch.full((4, 1), 5, dtype=torch.int32)
    got = applied(method, layer, x, torch.ones(4, 1), one)
    assert Quality.of(got, dense(layer, x, torch.ones(4, 1), one, silu)).meets(BAR)
    assert applied(method, layer, x[:0], torch.ones(0, 2), one[:0].repeat(1, 2)).shape == (0, HIDDEN)
