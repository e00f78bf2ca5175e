# SPDX-License-Identifier: BSD-3-Clause
"""Operators in the place of vLLM's extensions, called as vLLM calls them."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from vllm_superl8.platform import stand_ins
from vllm_superl8.platform.stand_ins import core

stand_ins.install("cpu")
from vllm import _custom_ops as ops  # noqa: E402  (the stand-ins come first)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_install_is_idempotent_and_imports_no_vllm(device):
    code = (
        "import sys\nfrom vllm_superl8.platform import stand_ins\n"
        f"stand_ins.install({device!r}); stand_ins.install({device!r})\n"
        "import torch\n"
        "print(sorted(name for name in sys.modules if name.startswith('vllm.')))\n"
        "print([name for name in sorted(dir(torch.ops._C)) if not name.startswith('_')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    empty = ["vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"] if device == "cuda" else []
    assert found[0] == str(empty)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operators_have_fakes_that_know_what_they_write(device):
    """opcheck on every operator whose arguments can be made on a CPU: schema, mutation marks, fake."""
    x = torch.randn(3, 8)
    lse = torch.randn(2, 3)
    states = torch.randn(3, 2, 4)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    calls = {
        torch.ops._C.silu_and_mul: (torch.empty(3, 4), x),
        torch.ops._C.swigluoai_and_mul: (torch.empty(3, 4), x, 1.7, 7.0),
        torch.ops._C.gelu_new: (torch.empty(3, 8), x),
        torch.ops._C.rms_norm: (torch.empty(3, 8), x, torch.ones(8), 1e-6),
        torch.ops._C.fused_add_rms_norm: (x.clone(), x.clone(), torch.ones(8), 1e-6),
        torch.ops._C.rotary_embedding: (torch.arange(3), x.clone(), x.clone(), 4, torch.randn(3, 4), True),
        torch.ops._C.apply_repetition_penalties_: (x.clone(), x > 0, x > 1, torch.ones(3)),
        torch.ops._C.merge_attn_states: (states.clone(), lse.clone(), states, lse, states, lse),
        torch.ops._C.vocab_parallel_embedding: (torch.empty(3, 8), torch.arange(3), x, 0, 2, 0, 5, 6),
        torch.ops._moe_C.topk_softmax: (torch.empty(3, 2), ids, ids.clone(), x, True),
        torch.ops._moe_C.grouped_topk: (x, 2, 1, 2, True, 1.0, torch.zeros(8)),
        torch.ops._moe_C.moe_sum: (states, torch.empty(3, 4)),
    }
    if device == "cpu":
        calls |= {
            torch.ops._C.greedy_argmax: (x,),
            torch.ops._C.fused_gumbel_argmax: (x, torch.arange(3)),
        }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_probes_say_no():
    assert ops.cutlass_scaled_mm_supports_fp8(70) is False
    assert ops.cutlass_scaled_mm_supports_fp4(70) is False
    assert ops.cutlass_scaled_mm_supports_block_fp8(70) is False
    assert ops.cutlass_group_gemm_supported(90) is False
    assert torch.ops._C.init_cpu_memory_env([0]) is None


# ---- activations and norms: vLLM's own layers, forward_cuda against forward_native


@pytest.fixture
def vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize(
    ("name", "arguments", "op"),
    [
        ("FatreluAndMul", (0.3,), "fatrelu_and_mul"),
        ("SiluAndMul", (), "silu_and_mul"),
        ("SituAndMul", (1.5, 2.0), "situ_and_mul"),
        ("SituAndMul", (1.5, None), "situ_and_mul"),
        ("SiluAndMulWithClamp", (1.5, 1.2, 0.5), "silu_and_mul_with_clamp"),
        ("MulAndSilu", (), "mul_and_silu"),
        ("GeluAndMul", ("none",), "gelu_and_mul"),
        ("GeluAndMul", ("tanh",), "gelu_tanh_and_mul"),
        ("SwigluOAIAndMul", (1.7, 1.5), None),
        ("SwigluStepAndMul", (1.5,), None),
        ("NewGELU", (), "gelu_new"),
        ("FastGELU", (), "gelu_fast"),
        ("QuickGELU", (), "gelu_quick"),
        ("ReLUSquaredActivation", (), "relu_squared"),
        ("ReLUSquaredActivation", (), "relu2_no_mul"),
    ],
)
def test_activations_of_vllm_find_their_operator(generator, vllm_config, name, arguments, op):
    from vllm.model_executor.layers import activation

    layer = getattr(activation, name)(*arguments)
    layer.op = op and getattr(torch.ops._C, op)  # as on CUDA
    forward = layer.forward_xpu if name == "SwigluStepAndMul" else layer.forward_cuda  # on CUDA that one is Triton's
    x = torch.randn(5, 32, generator=generator) * 2
    got, want = forward(x), layer.forward_native(x)
    assert want.abs().max() > 0.5
    assert (got - want).abs().max() < 2e-6 * want.abs().max()


def test_norms_write_in_place(generator):
    x, residual, weight = (torch.randn(3, 16, generator=generator) for _ in range(3))
    weight, out = weight[0], torch.empty(3, 16)
    ops.rms_norm(out, x, weight, 1e-6)
    norm = torch.nn.functional.rms_norm
    assert (out - norm(x, (16,), weight, 1e-6)).abs().max() < 1e-5
    total = x + residual
    ops.fused_add_rms_norm(x, residual, None, 1e-6)
    assert torch.equal(residual, total)
    assert (x - norm(total, (16,), None, 1e-6)).abs().max() < 1e-5


def test_rotary_embedding_is_vllms_own(generator, vllm_config):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = get_rope(64, 128, True, {"rope_theta": 10000.0, "rope_type": "default"}, torch.float32)
    positions, query, key = torch.tensor([3, 100]), torch.randn(2, 256), torch.randn(2, 64)
    want = rope.forward_native(positions, query.clone(), key.clone())
    ops.rotary_embedding(positions, query, key, 64, rope.cos_sin_cache, True)
    assert (query - want[0]).abs().max() < 1e-5 and (key - want[1]).abs().max() < 1e-5


def test_repetition_penalties_are_vllms_own(generator):
    logits = torch.randn(2, 50, generator=generator)
    masks = [torch.rand(2, 50, generator=generator) < 0.3 for _ in range(2)]
    penalties, want = torch.tensor([1.5, 0.8]), logits.clone()
    ops.apply_repetition_penalties_torch(want, *masks, penalties)
    ops.apply_repetition_penalties_cuda(logits, *masks, penalties)
    assert (logits - want).abs().max() < 1e-6


def test_merge_attn_states_is_vllms_own(generator):
    from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

    states = [torch.randn(4, 2, 8, generator=generator) for _ in range(2)]
    lses = [torch.randn(2, 4, generator=generator) for _ in range(2)]
    lses[0][0, 0] = lses[1][0, 1] = float("inf")
    got, want = ((torch.empty(4, 2, 8), torch.empty(2, 4)) for _ in range(2))
    _merge_attn_states_torch(want[0], states[0], lses[0], states[1], lses[1], want[1], 3)
    ops.merge_attn_states(got[0], states[0], lses[0], states[1], lses[1], got[1], 3)
    assert (got[0] - want[0]).abs().max() < 1e-6
    assert (got[1] - want[1])[:, 1:].abs().max() < 1e-6
    with pytest.raises(ValueError, match="a quantised output is not served"):
        ops.merge_attn_states(got[0], states[0], lses[0], states[1], lses[1], output_scale=torch.ones(1))


def test_vocab_parallel_embedding_gathers_a_shard():
    weight = torch.arange(12.0).view(6, 2)  # words 4..6, one row of padding, added words 20, 21
    got = ops.vocab_parallel_embedding(torch.tensor([3, 4, 6, 7, 20, 21, 22]), weight, 4, 7, 1, 20, 22)
    assert got.tolist() == [[0, 0], [0, 1], [4, 5], [0, 0], [8, 9], [10, 11], [0, 0]]


def test_greedy_and_seeded_sampling(generator):
    logits = torch.randn(4, 100, generator=generator)
    assert torch.equal(torch.ops._C.greedy_argmax(logits), logits.argmax(-1))
    seeds = torch.tensor([1, 2, 1, 2**31 - 1])
    drawn = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    assert torch.equal(drawn, torch.ops._C.fused_gumbel_argmax(logits, seeds))
    assert drawn.dtype == torch.int64


# ---- experts


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


# ---- memory


def test_swap_blocks_copies_pages():
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)
    ops.swap_blocks(source[10:], target, 10, torch.tensor([[0, 5], [2, 1]]))
    want = torch.zeros(60, dtype=torch.uint8)
    want[50:60], want[10:20] = source[10:20], source[30:40]
    assert torch.equal(target, want)


def test_swap_blocks_batch_copies_by_address():
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    addresses = [torch.tensor([tensor.data_ptr() + i for i in (0, 20)]) for tensor in (source, target)]
    ops.swap_blocks_batch(*addresses, torch.tensor([5, 7]))
    assert torch.equal(target, torch.where((source < 5) | ((source >= 20) & (source < 27)), source, 0))


def test_weak_ref_tensor_shares_memory_and_owns_none():
    storage_owner = torch.arange(24.0)
    x = storage_owner[4:].view(4, 5).T
    alias = core._weak_ref_tensor(x)
    assert torch.equal(alias, x) and alias.stride() == x.stride() and alias.data_ptr() == x.data_ptr()
    x[0, 0] = 99
    assert alias[0, 0] == 99
    reference = weakref.ref(storage_owner)
    del storage_owner, x
    gc.collect()
    assert reference() is None


def test_a_view_keeps_alive_what_it_is_made_of():
    """As the GPU view of pinned memory does, here with both on the CPU."""
    source = torch.arange(10.0)
    reference = weakref.ref(source)
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.data = core._keeping_alias(source, source.untyped_storage().data_ptr(), source.device)
    del source
    gc.collect()
    assert reference() is not None and parameter[9] == 9
    del parameter
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
def test_views_of_pinned_memory_are_seen_by_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    stand_ins.install("cuda")
    pinned = torch.arange(10.0).pin_memory()
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(pinned[2:])
    assert view.is_cuda and view.tolist() == list(range(2, 10))
    pinned += 1
    view *= 2
    torch.cuda.synchronize()
    assert pinned.tolist() == [1, 2, *(2 * i for i in range(3, 11))]
    loose = torch.ops._C.get_cuda_view_from_cpu_tensor(torch.arange(3))
    assert loose.is_cuda and loose.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_weak_references_work_inside_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    stand_ins.install("cuda")
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alias = torch.ops._C.weak_ref_tensor(x * 3)
    graph.replay()
    torch.cuda.synchronize()
    assert alias.tolist() == [3.0] * 8


@pytest.mark.gpu
def test_pages_move_between_host_and_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from vllm_superl8.platform.stand_ins import cache

    on_gpu, on_host = torch.arange(1000, device="cuda"), torch.zeros(1000, dtype=torch.int64).pin_memory()
    cache._copy_on_stream(on_gpu[10:].data_ptr(), on_host.data_ptr(), 800)
    torch.cuda.synchronize()
    assert on_host[:100].tolist() == list(range(10, 110)) and not on_host[100:].any()
    cache._copy_on_stream(on_host.data_ptr(), on_gpu.data_ptr(), 80)
    torch.cuda.synchronize()
    assert on_gpu[:11].tolist() == [*range(10, 20), 10]
