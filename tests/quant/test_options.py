# SPDX-License-Identifier: BSD-3-Clause
"""Options of --quantization superl8, and what they do to a linear layer."""

import pytest
import torch

from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.gguf.methods import GgufWeights
from vllm_superl8.quant.int4_linear import Int4LinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.online import OnlineWeights
from vllm_superl8.quant.options import Options


@pytest.mark.parametrize(
    ("weights", "options", "group_size"),
    [
        (OnlineWeights, Options(), -1),
        (OnlineWeights, Options(activation="group128"), 128),
        (GgufWeights, Options(activation="token"), -1),
        (GgufWeights, Options(activation="group128"), 128),
        (GgufWeights, Options(weight_bits=8), 128),
    ],
)
def test_linear_layers_take_the_activation_scheme(weights, options, group_size):
    method = weights(options).linear(None, "model.layers.0.mlp.down_proj")
    assert type(method) is Int8LinearMethod
    assert method.group_size == group_size


def test_linear_layers_of_gguf_files_keep_their_blocks_unless_a_scheme_is_asked_for():
    assert isinstance(GgufWeights(Options()).linear(None, "model.layers.0.mlp.down_proj"), BlockLinearMethod)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 5}, "does not know option bits"),
        ({"activation": "group64"}, "activation='group64': choose one of auto, token, group128"),
        ({"ignore": "lm_head"}, "ignore='lm_head': wanted a list"),
        ({"weight_bits": 3}, "weight_bits=3: choose 4 or 8"),
        ({"moe": 1}, "moe=1: wanted true or false"),
    ],
)
def test_wrong_options_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        Options.from_dict(given)


@pytest.mark.parametrize(("group_size", "k"), [(-1, 576), (128, 512), (128, 576), (128, 100)])
def test_linear_layer_keeps_its_product_whatever_k_is(group_size, k):
    """K that is no whole number of groups is padded; the product must not notice."""
    torch.manual_seed(0)
    layer, method = torch.nn.Module(), Int8LinearMethod(group_size)
    weight, x = torch.randn(48, k) + 0.3, torch.randn(5, k)
    x[:, 7] *= 20  # an outlier channel
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.orig_dtype, layer.input_size_per_partition = torch.float32, k
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM calls it twice
    wanted, got = x.double() @ weight.double().T, method.apply(layer, x).double()
    assert layer.weight.dtype == torch.int8
    error = (got - wanted).norm() / wanted.norm()
    print(f"relative error {error:.4f}")
    assert error < (0.03 if group_size == 128 and k > 128 else 0.06)  # one scale must hold the outlier too
    assert (method.dequantize_weight(layer) - weight).norm() / weight.norm() < 0.01


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_4_bit_layer_keeps_its_product(group_size):
    torch.manual_seed(0)
    layer, method = torch.nn.Module(), Int4LinearMethod(group_size)
    weight, x = torch.randn(48, 256) + 0.3, torch.randn(5, 256)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.orig_dtype, layer.input_size_per_partition = torch.float32, 256
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM calls it twice
    stored = method.dequantize_weight(layer)
    error = ((method.apply(layer, x) - x @ stored.T).norm() / (x @ stored.T).norm()).item()
    cost = ((stored - weight).norm() / weight.norm()).item()
    print(f"groups of {group_size}: product {error:.1e}, weight {cost:.3f}")
    assert layer.weight.dtype == torch.uint8 and layer.weight.shape == (48, 128)
    assert error < 0.01  # int8 activations
    assert cost < 0.12  # 4 bits; measured 0.076 to 0.096
