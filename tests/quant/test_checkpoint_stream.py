# SPDX-License-Identifier: BSD-3-Clause
"""From the tensors of a quantised checkpoint to those of our layers, and which checkpoints are taken over."""

import pytest
import tiny_stored
import torch
from safetensors.torch import load_file

from vllm_superl8.checkpoint.safetensors_header import read_folder
from vllm_superl8.checkpoint.schemes import reader
from vllm_superl8.formats import int8
from vllm_superl8.quant.checkpoint import stream
from vllm_superl8.quant.checkpoint.linear import CheckpointLinearMethod
from vllm_superl8.quant.checkpoint.source import Source
from vllm_superl8.quant.checkpoint.targets import group_size
from vllm_superl8.quant.config import Superl8Config
from vllm_superl8.quant.options import Options


def written(tmp_path, name, model="qwen3"):
    """Tensors, matrices and reference state of a tiny checkpoint."""
    scheme = tiny_stored.SCHEMES[name]
    built = tiny_stored.write(scheme, tmp_path, model)
    matrices = reader(scheme.config)(scheme.config, read_folder(tmp_path))
    return load_file(tmp_path / "model.safetensors"), matrices, built.state_dict()


def convert(tensors, matrices, targets, dtype=torch.float32):
    return dict(stream.converted(iter(tensors.items()), matrices, targets, dtype, "cpu"))


@pytest.mark.parametrize("name", ["ct-w8a8-static", "gptq-4", "bitsandbytes-int8"])
def test_every_tensor_arrives_under_the_name_of_a_parameter(tmp_path, name):
    tensors, matrices, state = written(tmp_path, name)
    targets = dict.fromkeys(matrices, -1)
    got = convert(tensors, matrices, targets)
    assert len(matrices) == 21
    wanted = set(state) | {f"{module}.weight_scale" for module in matrices}
    assert got.keys() == wanted - {"lm_head.weight"}  # tied
    for module in matrices:
        weight = int8.dequantize(got[f"{module}.weight"], got[f"{module}.weight_scale"])
        error = (weight - state[f"{module}.weight"]).norm() / state[f"{module}.weight"].norm()
        assert error < 0.01


def test_modules_that_no_layer_of_ours_asks_for_arrive_in_16_bit(tmp_path):
    tensors, matrices, state = written(tmp_path, "awq")
    got = convert(tensors, matrices, {}, torch.bfloat16)
    for module in matrices:
        assert torch.equal(got[f"{module}.weight"], state[f"{module}.weight"].bfloat16())


def test_a_tensor_that_never_comes_is_named(tmp_path):
    tensors, matrices, _ = written(tmp_path, "gptq-4")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.scales did not come with"):
        convert(tensors, matrices, {})


def test_zero_points_of_a_symmetric_checkpoint_are_refused(tmp_path):
    tensors, matrices, _ = written(tmp_path, "gptq-4")
    tensors["model.layers.0.mlp.up_proj.qzeros"] += 1
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj: stored zero points are not the middle"):
        convert(tensors, matrices, {})


def test_scales_that_are_not_used_are_said(tmp_path, monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(stream.logger, level, lambda text, *values: lines.append(text % values))
    tensors, matrices, _ = written(tmp_path, "ct-w8a8-static")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.v_proj.output_scale"] = torch.ones(1)
    got = convert(tensors, matrices, dict.fromkeys(matrices, -1))
    assert not any(name.endswith("scale") and not name.endswith("weight_scale") for name in got)
    text = "\n".join(lines)
    assert "21 matrices of compressed-tensors, 8 bits, channel: int8 codes as stored, one scale a row" in text
    assert "21 static activation scales are not used" in text
    assert "2 KV cache scales are not used: they are for an fp8 cache" in text


def test_conversion_error_is_said_with_the_worst_layer(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(stream.logger, "info", lambda text, *values: lines.append(text % values))
    tensors, matrices, _ = written(tmp_path, "fp8")
    damaged = tensors["model.layers.1.mlp.down_proj.weight"].float()
    damaged[:, 0] = 448  # an outlier in every row takes the resolution from the others
    tensors["model.layers.1.mlp.down_proj.weight"] = damaged.to(torch.float8_e4m3fn)
    convert(tensors, matrices, dict.fromkeys(matrices, -1))
    (said,) = [line for line in lines if "conversion error: median" in line]
    print(said)
    assert said.endswith("(model.layers.1.mlp.down_proj)")


@pytest.mark.parametrize(
    ("name", "k", "activation", "wanted"),
    [
        ("ct-w8a8", 256, "auto", -1),
        ("ct-w8a8", 256, "group128", 128),
        ("gptq-4-g32-desc_act", 256, "auto", 128),
        ("gptq-4-g32-desc_act", 256, "token", -1),
        ("gptq-4-g32-desc_act", 96, "auto", -1),
    ],
)
def test_groups_follow_the_checkpoint_unless_the_user_says(tmp_path, name, k, activation, wanted):
    _, matrices, _ = written(tmp_path, name)
    assert group_size(list(matrices.values())[:3], k, Options(activation=activation), "layer") == wanted


def test_layers_find_their_parts_by_vllm_names(tmp_path):
    _, matrices, _ = written(tmp_path, "ct-w8a8", "qwen3_moe")
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    class Mapper:
        @staticmethod
        def map_name(name):
            return name.replace("model.", "language_model.model.") if "layers.2" not in name else None

    source = Source(matrices)
    source.rename(Mapper)
    attention = "language_model.model.layers.0.self_attn"
    parts = [part.name for part in source.parts(f"{attention}.qkv_proj", packed)]
    assert parts == [f"model.layers.0.self_attn.{which}_proj" for which in "qkv"]
    assert source.parts(f"{attention}.o_proj", packed)[0].name == "model.layers.0.self_attn.o_proj"
    assert source.parts("language_model.lm_head", packed) == [None]
    assert source.parts("language_model.model.layers.2.self_attn.o_proj", packed) == [None]
    assert len(source.experts("language_model.model.layers.1.mlp.experts")) == 8 * 3


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [-1, 128])
def test_layer_multiplies_what_is_stored(shifted, size):
    """Activations all of one sign: around the middle of their range they have twice the resolution."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256), torch.rand(5, 256) + 3
    layer = torch.nn.Module()
    codes, scales = int8.quantize(weight, size)
    layer.weight, layer.weight_scale = (torch.nn.Parameter(t, requires_grad=False) for t in (codes, scales))
    method = CheckpointLinearMethod([], size)
    method.shifted = shifted
    method.process_weights_after_loading(layer)
    bias = torch.randn(48)
    wanted = x @ int8.dequantize(codes, scales).T + bias
    error = ((method.apply(layer, x, bias) - wanted).norm() / wanted.norm()).item()
    print(f"shifted {shifted}, groups {size}: {error:.1e}")
    assert error < (1e-3 if shifted else 6e-3)


def test_only_what_has_a_reader_is_taken_over():
    override = Superl8Config.override_quantization_method
    for name, scheme in tiny_stored.SCHEMES.items():
        assert override(dict(scheme.config), "superl8") == "superl8", name
        assert override(dict(scheme.config), "gptq") is None
    assert override({"quant_method": "superl8"}, None) is None
    with pytest.raises(ValueError, match="does not read checkpoints of 'aqlm'; it reads compressed-tensors, gptq"):
        override({"quant_method": "aqlm"}, "superl8")
    assert override({"quant_method": "aqlm"}, None) is None


def test_wish_for_an_fp8_cache_is_taken_out():
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert Superl8Config.override_quantization_method(config, "superl8") == "superl8"
    assert "kv_cache_quant_algo" not in config
