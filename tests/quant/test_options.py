# SPDX-License-Identifier: BSD-3-Clause
"""Options of --quantization superl8, and what they do to a linear layer."""

import pytest
import torch

from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.options import Options


def test_defaults_take_group_scales_for_gguf_alone():
    assert Options().group_size(is_gguf=True) == 128
    assert Options().group_size(is_gguf=False) == -1
    assert Options(activation="token").group_size(is_gguf=True) == -1
    assert Options(activation="group128").group_size(is_gguf=False) == 128


def test_linear_layers_of_gguf_files_keep_their_blocks_unless_a_scheme_is_asked_for():
    assert Options().in_blocks(is_gguf=True)
    assert not Options().in_blocks(is_gguf=False)
    assert not Options(activation="group128").in_blocks(is_gguf=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 5}, "does not know option bits"),
        ({"activation": "group64"}, "activation='group64': choose one of auto, token, group128"),
        ({"ignore": "lm_head"}, "ignore='lm_head': wanted a list"),
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
