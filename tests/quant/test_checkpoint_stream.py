# SPDX-License-Identifier: BSD-3-Clause
"""From the tensors of a quantised checkpoint to those of our layers, and which checkpoints are taken over."""

import pytest
import torch
from safetensors.torch import load_file

from vllm_superl8.checkpoint.safetensors_header import read_folder
from vllm_superl8.checkpoint.schemes import reader
from vllm_superl8.formats import int8
from vllm_superl8.quant.checkpoint import stream
from vllm_superl8.quant.checkpoint.linear import method
from vllm_superl8.quant.checkpoint.source import Source
from vllm_superl8.quant.checkpoint.targets import Target, choose
from vllm_superl8.quant.config import Superl8Config
from vllm_superl8.quant.options import Options

import tiny_stored

ROWS = Target("int8", -1)


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
    targets = dict.fromkeys(matrices, ROWS)
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


def test_codes_of_no_matrix_are_refused(tmp_path):
    tensors, matrices, _ = written(tmp_path, "fp8")
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2, 4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj holds torch\.float8_e4m3fn codes, but is no part of"):
        convert(tensors, matrices, {})


def test_zero_points_of_a_symmetric_checkpoint_are_refused(tmp_path):
    tensors, matrices, _ = written(tmp_path, "gptq-4")
    tensors["model.layers.0.mlp.up_proj.qzeros"] += 1
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj: stored zero points are not the middle"):
        convert(tensors, matrices, {})


@pytest.mark.parametrize(("name", "suffix"), [("fp8", "weight"), ("ct-w8a8", "weight_scale"), ("gptq-4", "scales")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, name, suffix):
    tensors, matrices, _ = written(tmp_path, name)
    tensor = tensors[f"model.layers.0.mlp.up_proj.{suffix}"]
    damaged = tensor.float()
    damaged[0, 0] = torch.nan
    tensors[f"model.layers.0.mlp.up_proj.{suffix}"] = damaged.to(tensor.dtype)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj: its stored weights or scales have NaN"):
        convert(tensors, matrices, dict.fromkeys(matrices, ROWS))


def test_scales_that_are_not_used_are_said(tmp_path, monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(stream.logger, level, lambda text, *values: lines.append(text % values))
    tensors, matrices, _ = written(tmp_path, "ct-w8a8-static")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.v_proj.output_scale"] = torch.ones(1)
    got = convert(tensors, matrices, dict.fromkeys(matrices, ROWS))
    assert not any(name.endswith("scale") and not name.endswith("weight_scale") for name in got)
    text = "\n".join(lines)
    assert "21 matrices of compressed-tensors, 8 bits, channel: codes as stored, int8, one scale a row" in text
    assert "21 static activation scales are not used" in text
    assert "2 KV cache scales are not used: they are for an fp8 cache" in text


def test_conversion_error_is_said_with_the_worst_layer(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(stream.logger, "info", lambda text, *values: lines.append(text % values))
    tensors, matrices, _ = written(tmp_path, "fp8")
    damaged = tensors["model.layers.1.mlp.down_proj.weight"].float()
    damaged[:, 0] = 448  # an outlier in every row takes the resolution from the others
    tensors["model.layers.1.mlp.down_proj.weight"] = damaged.to(torch.float8_e4m3fn)
    convert(tensors, matrices, dict.fromkeys(matrices, ROWS))
    (said,) = [line for line in lines if "conversion error: median" in line]
    print(said)
    assert said.endswith("(model.layers.1.mlp.down_proj)")


HALF = torch.float16


@pytest.mark.parametrize(
    ("name", "k", "options", "wanted"),
    [
        ("ct-w8a8", 256, {}, ROWS),
        ("ct-w8a8", 256, {"activation": "group128"}, Target("int8", 128)),
        ("ct-w8a8", 256, {"weight_bits": 4}, Target("int4_zero", 64, scale_dtype=HALF)),
        ("ct-w4a16-g128", 256, {}, Target("int4", 128)),
        ("ct-w4a16-g32-asymmetric", 256, {}, Target("int4_zero", 32)),
        ("ct-w3a16-g64", 256, {}, Target("int4", 64)),
        ("gptq-4-g32-desc_act", 256, {}, Target("int4", 32, True, HALF)),
        ("gptq-4-g32-desc_act", 256, {"weight_bits": 8}, Target("int8", 128)),
        ("gptq-4-g32-desc_act", 256, {"weight_bits": 8, "activation": "token"}, ROWS),
        ("gptq-4-g32-desc_act", 96, {"weight_bits": 8}, ROWS),
        ("gptq-4-g128-asymmetric", 64, {}, Target("int4_zero", 64, scale_dtype=HALF)),
        ("gptq-4-g128-asymmetric", 48, {}, ROWS),
        ("fp8-block", 256, {}, Target("int8", 128)),
        ("fp8", 256, {}, ROWS),
        ("ct-nvfp4", 256, {}, Target("int8", 128)),
    ],
)
def test_formats_follow_the_checkpoint_unless_the_user_says(tmp_path, name, k, options, wanted):
    _, matrices, _ = written(tmp_path, name)
    assert choose(list(matrices.values())[:3], k, False, Options(**options), "layer") == wanted


def test_activation_order_across_ranks_becomes_int8(tmp_path):
    _, matrices, _ = written(tmp_path, "gptq-4-g32-desc_act")
    assert choose(list(matrices.values())[:1], 256, True, Options(), "layer") == Target("int8", 128)


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


def loaded(target, **tensors):
    """A layer with these parameters and the method for `target`."""
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.orig_dtype, layer.input_size_per_partition = torch.float32, 256
    return layer, method([], target)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [-1, 128])
def test_layer_multiplies_what_is_stored(shifted, size):
    """Activations all of one sign: around the middle of their range they have twice the resolution."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256), torch.rand(5, 256) + 3
    codes, scales = int8.quantize(weight, size)
    layer, served = loaded(Target("int8", size), weight=codes, weight_scale=scales)
    served.shifted = shifted
    served.process_weights_after_loading(layer)
    bias = torch.randn(48)
    wanted = x @ int8.dequantize(codes, scales).T + bias
    error = ((served.apply(layer, x, bias) - wanted).norm() / wanted.norm()).item()
    print(f"shifted {shifted}, groups {size}: {error:.1e}")
    assert error < (1e-3 if shifted else 6e-3)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gptq-4-g32-desc_act", Target("int4", 32, True, HALF)),
        ("gptq-4-g64-asymmetric-v2", Target("int4_zero", 64, False, HALF)),
        ("ct-w4a16-g64-actorder", Target("int4", 64, True)),
        ("awq", Target("int4_zero", 32, False, HALF)),
        ("gptq-2", Target("int4_zero", 32, False, HALF)),
    ],
)
def test_4_bit_layer_multiplies_what_is_stored(tmp_path, name, target):
    """Nothing but the activations is rounded, and they have their scales for every 32 columns."""
    tensors, matrices, state = written(tmp_path, name)
    module = "model.layers.0.mlp.down_proj"
    got = convert(tensors, matrices, {module: target})
    layer, served = loaded(target, **{n.rpartition(".")[2]: t for n, t in got.items() if n.startswith(module)})
    assert layer.weight.shape == (128, 128) and layer.weight.dtype == torch.uint8
    served.process_weights_after_loading(layer)
    served.process_weights_after_loading(layer)  # vLLM may call it twice
    weight = state[f"{module}.weight"]
    assert torch.equal(served.dequantize_weight(layer), weight)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) + 0.3
    x[:, 7] *= 8
    error = ((served.apply(layer, x) - x @ weight.T).norm() / (x @ weight.T).norm()).item()
    print(f"{name}: {error:.1e}")
    assert error < 0.01


def test_activation_orders_of_one_layer_must_agree():
    columns = torch.stack((torch.arange(256), torch.arange(256).flip(0))).int()
    layer, served = loaded(Target("int4", 32, True), weight=torch.zeros(4, 128).byte(), weight_columns=columns)
    with pytest.raises(ValueError, match="their activation orders differ"):
        served.process_weights_after_loading(layer)


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
