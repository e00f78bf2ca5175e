# SPDX-License-Identifier: BSD-3-Clause
"""Operators in the place of vLLM's extensions, called as vLLM calls them."""

import subprocess
import sys

import pytest
import torch

from vllm_superl8.platform import stand_ins

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
        ("SiluAndMulWithClamp", (1.5, 1.0, 0.0), "silu_and_mul_with_clamp"),  # the operator's defaults
        ("MulAndSilu", (), "mul_and_silu"),
        ("GeluAndMul", ("none",), "gelu_and_mul"),
        ("GeluAndMul", ("tanh",), "gelu_tanh_and_mul"),
        ("SwigluOAIAndMul", (1.7, 1.5), None),
        ("SwigluOAIAndMul", (1.702, 7.0), None),
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
