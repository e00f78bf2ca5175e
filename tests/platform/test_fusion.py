# SPDX-License-Identifier: BSD-3-Clause
"""Fusion passes: which norms and activations become one op with their quantisation, and that results stay the same."""

import functools

import pytest
import torch
import torch._inductor.pattern_matcher as pm
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_superl8.platform import stand_ins

stand_ins.install("cpu")
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402  (the stand-ins come first)

from vllm_superl8.ops.quantize import quantize_int8  # noqa: E402
from vllm_superl8.platform import common, fusion  # noqa: E402

common.import_ir_kernels()
rms_norm, fused_add_rms_norm = torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class Config:
    """As much of a model's configuration as passes read."""

    def __init__(self, dtype):
        self.dtype = dtype


@functools.cache
def passes(dtype):
    config = VllmConfig()
    config.model_config = Config(dtype)
    with set_current_vllm_config(config, check_compile=False):
        return [fusion.NormQuantFusionPass(config), fusion.ActQuantFusionPass(config)]


def data(*shape, dtype, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.2
    x[..., ::16] *= 10
    return x.to(dtype)


def fused(function, arguments):
    """(names of the superl8 ops in the graph after the passes, results after, results before)."""
    with FakeTensorMode() as mode:
        graph = pm.fwd_only(function, [mode.from_tensor(a) for a in arguments])
    before = graph(*arguments)
    for run in passes(arguments[0].dtype):
        run(graph.graph)
    graph.graph.lint()
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not [node for node in graph.graph.nodes if node.op == "call_function" and "val" not in node.meta]
    names = [str(t).split(".")[1] for t in targets if str(t).startswith("superl8.")]
    return names, graph(*arguments), before


def assert_equal(got, want):
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        difference = (ours.double() - theirs.double()).abs()
        if ours.dtype == torch.int8:  # vLLM's norm rounds before it multiplies by a 16-bit weight, ours after
            assert difference.max() <= 2
        else:
            assert (difference <= 0.02 * theirs.double().abs().amax()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", fusion.GROUP_SIZES)
@pytest.mark.parametrize("readers", [1, 2])
def test_norms_fuse_with_all_their_quantisations(dtype, group_size, readers):
    def function(x, weight):
        normalised = rms_norm(x, weight, 1e-6)
        return [t for _ in range(readers) for t in quantize_int8(normalised, group_size)]

    names, got, want = fused(function, (data(3, 256, dtype=dtype), data(256, dtype=dtype, seed=1)))
    assert names == ["rms_norm_quantize"]
    assert_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uses_total", [True, False])
def test_norms_with_a_residual_fuse(dtype, uses_total):
    def function(x, residual, weight):
        normalised, total = fused_add_rms_norm(x, residual, weight, 1e-6)
        codes, scales = quantize_int8(normalised)
        return (codes, scales, total * 2) if uses_total else (codes, scales)

    arguments = (data(3, 256, dtype=dtype), data(3, 256, dtype=dtype, seed=2), data(256, dtype=dtype, seed=1))
    names, got, want = fused(function, arguments)
    assert names == ["add_rms_norm_quantize"]
    assert_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norms_take_their_stored_weight(dtype):
    def function(x, weight):
        return quantize_int8(rms_norm(x, weight.float() + 1.0, 1e-6))

    arguments = (data(3, 256, dtype=dtype), data(256, dtype=dtype, seed=1))
    names, got, want = fused(function, arguments)
    assert names == ["rms_norm_quantize"]
    assert_equal(got, want)
    with FakeTensorMode() as mode:
        graph = pm.fwd_only(function, [mode.from_tensor(a) for a in arguments])
    passes(dtype)[0](graph.graph)
    (node,) = [node for node in graph.graph.nodes if "rms_norm_quantize" in str(node.target)]
    assert node.args[1].op == "placeholder" and node.args[3] == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (*quantize_int8(n := rms_norm(x, w, 1e-6)), n),  # returned too
        lambda x, w: (*quantize_int8(n := rms_norm(x, w, 1e-6)), n @ w),  # a router
        lambda x, w: (*quantize_int8(n := rms_norm(x, w, 1e-6)), *quantize_int8(n, 128)),
        lambda x, w: quantize_int8(rms_norm(x, w, 1e-6, 128)),  # over a part of the row
        lambda x, w: quantize_int8(rms_norm(x, w.bfloat16(), 1e-6)),
        lambda x, w: (rms_norm(x, w, 1e-6),),
    ],
)
def test_norms_that_others_need_stay(function):
    arguments = (data(3, 256, dtype=torch.float32), data(256, dtype=torch.float32, seed=1))
    names, got, want = fused(function, arguments)
    assert not any("norm" in name for name in names)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", fusion.GATED)
@pytest.mark.parametrize("group_size", fusion.GROUP_SIZES)
def test_gated_activations_fuse(dtype, activation, group_size):
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    with set_current_vllm_config(VllmConfig()):
        layer = SiluAndMul() if activation == "silu" else GeluAndMul("none" if activation == "gelu" else "tanh")

    def function(x):
        return quantize_int8(layer.forward_native(x), group_size)

    names, got, want = fused(function, (data(7, 768, dtype=dtype),))
    assert names == ["act_and_mul_quantize"]
    assert_equal(got, want)


def test_activations_that_others_need_stay():
    def function(x):
        y = torch.nn.functional.silu(x[..., :128]) * x[..., 128:]
        return (*quantize_int8(y), y)

    names, got, want = fused(function, (data(3, 256, dtype=torch.float32),))
    assert names == ["quantize_int8"]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
