# SPDX-License-Identifier: BSD-3-Clause
"""Every published scheme is read back to the values that its writer says the file stands for."""

import pytest
import torch

from vllm_superl8.checkpoint.convert import to_int8, values
from vllm_superl8.checkpoint.matrix import Codes
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes import reader

import tiny_stored

NAMES = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
NAMES |= {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def weight(n=128, k=256):
    """With a mean, rows of different size and outlier columns."""
    generator = torch.Generator().manual_seed(n + k)
    w = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator) + 0.1
    w[:, ::37] *= 8
    return w


def headers(tensors, module="layers.0.proj"):
    return {
        f"{module}.{name}": Stored(f"{module}.{name}", NAMES[t.dtype], tuple(t.shape), "model.safetensors")
        for name, t in tensors.items()
    }


def read_back(scheme, tensors):
    """The matrix that the reader finds, and its decoded form."""
    stored = headers(tensors)
    (matrix,) = reader(scheme.config)(scheme.config, stored).values()
    assert matrix.name == "layers.0.proj"
    return matrix, matrix.decode({name: tensors[name] for name in matrix.tensors})


@pytest.mark.parametrize("name", tiny_stored.SCHEMES)
@pytest.mark.parametrize("shape", [(128, 256), (384, 128)])
def test_reader_gives_the_values_of_the_writer(name, shape):
    scheme = tiny_stored.SCHEMES[name]
    tensors, wanted = scheme.pack(weight(*shape))
    matrix, decoded = read_back(scheme, tensors)
    assert matrix.shape in (shape, None)
    got = values(decoded)
    assert got.shape == shape
    error = (got - wanted).abs().max() / wanted.abs().max()
    print(f"{name}: {error:.1e}")
    assert error < (2**-8 if "nvfp4" in name else 1e-6)  # the library's NVFP4 values are bfloat16
    assert (wanted - weight(*shape)).norm() / weight(*shape).norm() < 0.6  # the scheme's own error, of 2 to 8 bits


@pytest.mark.parametrize(
    ("name", "group_size"),
    [
        ("ct-w8a8", -1),
        ("ct-w8a8", 128),
        ("ct-w8a8-g128", 128),
        ("ct-w8a16", -1),
        ("ct-w4a16-g128", 128),
        ("gptq-8", 128),
        ("gptq-8-rows", -1),
        ("gptq-4", 128),
        ("gptq-4-g128-asymmetric", 128),
        ("bitsandbytes-int8", -1),
    ],
)
def test_integers_that_fit_are_taken_over_exactly(name, group_size):
    scheme = tiny_stored.SCHEMES[name]
    tensors, wanted = scheme.pack(weight())
    _, decoded = read_back(scheme, tensors)
    codes, scales, sqnr = to_int8(decoded, group_size)
    assert sqnr == float("inf")
    assert codes.dtype == torch.int8 and scales.shape == (128, 1 if group_size == -1 else 2)
    got = codes.float() * scales.repeat_interleave(256 // scales.shape[1], 1)
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "group_size"),
    [
        ("ct-w8a16-g32-asymmetric", 128),
        ("ct-w4a16-g32-asymmetric", 128),
        ("gptq-4-g32-desc_act", 128),
        ("gptq-8", -1),
        ("fp8", -1),
        ("fp8-block", 128),
        ("ct-nvfp4", 128),
        ("bitsandbytes-nf4", 128),
    ],
)
def test_other_values_are_quantised_with_the_error_reported(name, group_size):
    scheme = tiny_stored.SCHEMES[name]
    tensors, _ = scheme.pack(weight())
    _, decoded = read_back(scheme, tensors)
    wanted = values(decoded)
    codes, scales, sqnr = to_int8(decoded, group_size)
    got = codes.float() * scales.repeat_interleave(256 // scales.shape[1], 1)
    measured = 20 * torch.log10(wanted.norm() / (got - wanted).norm()).item()
    print(f"{name}: {measured:.1f} dB")
    assert abs(measured - sqnr) < 0.01
    assert 33 < sqnr < 60  # measured 34.0 to 37.2, with outlier columns eight times as large


def test_activation_order_is_sorted_away():
    scheme = tiny_stored.SCHEMES["gptq-4-g32-desc_act"]
    tensors, wanted = scheme.pack(weight())
    matrix, decoded = read_back(scheme, tensors)
    assert matrix.ordered and decoded.group_of is not None
    ordered, columns = decoded.in_order()
    assert ordered.group_of is None
    assert torch.equal(ordered.values(), wanted[:, columns])
    same, none = Codes(decoded.codes, decoded.scales, None, torch.arange(256) // 32).in_order()
    assert none is None and same.group_of is None


def changed(name, suffix, change):
    """Tensors of a scheme with one of them changed, or gone if `change` gives None."""
    tensors, _ = tiny_stored.SCHEMES[name].pack(weight())
    new = change(tensors.pop(suffix))
    return tensors if new is None else {**tensors, suffix: new}


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("ct-w8a8", "weight_scale", lambda t: None, r"layers\.0\.proj\.weight_scale is missing"),
        ("ct-w8a8", "weight_scale", lambda t: t[:-1], r"proj\.weight_scale has shape \[127, 1\], wanted \[128"),
        ("ct-w8a8-g128", "weight_scale", lambda t: t[:, :1], r"proj\.weight_scale has shape \[128, 1\], wanted"),
        ("ct-w8a8", "weight", lambda t: t.to(torch.uint8), r"proj\.weight is U8, wanted I8"),
        ("ct-w4a16-g32-asymmetric", "weight_zero_point", lambda t: None, r"proj\.weight_zero_point is missing"),
        ("ct-w4a16-g64-actorder", "weight_g_idx", lambda t: None, r"proj\.weight_g_idx is missing"),
        ("ct-nvfp4", "weight_global_scale", lambda t: None, r"proj\.weight_global_scale is missing"),
        ("gptq-4", "scales", lambda t: None, r"proj\.scales is missing"),
        ("gptq-4", "qzeros", lambda t: t[:1], r"proj\.qzeros has shape \[1, 16\], wanted \[2, 16\]"),
        ("gptq-4-g32-desc_act", "g_idx", lambda t: None, r"proj\.g_idx is missing"),
        ("awq", "qzeros", lambda t: None, r"proj\.qzeros is missing"),
        ("awq", "scales", lambda t: t[:2], r"proj\.scales has shape \[2, 128\], wanted \[4, 128\]"),
        ("fp8", "weight_scale", lambda t: None, r"proj\.weight_scale is missing"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:, :1], r"_scale_inv has shape \[1, 1\], wanted \[1, 2\]"),
        ("modelopt-nvfp4", "weight_scale_2", lambda t: None, r"proj\.weight_scale_2 is missing"),
        ("bitsandbytes-int8", "SCB", lambda t: None, r"proj\.SCB is missing"),
        ("bitsandbytes-nf4", "weight.absmax", lambda t: None, r"proj\.weight\.absmax is missing"),
        ("bitsandbytes-nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: None, r"quant_state.*missing"),
    ],
)  # fmt: skip
def test_missing_and_wrong_tensors_are_named(name, suffix, change, message):
    config = tiny_stored.SCHEMES[name].config
    with pytest.raises(ValueError, match=message):
        reader(config)(config, headers(changed(name, suffix, change)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq-4", {"group_size": 64}, r"proj\.scales has shape .*wanted \[4, 128\] .*groups of 64"),
        ("gptq-4", {"group_size": 100}, r"proj: groups of 100 columns do not divide its rows of 256"),
        ("gptq-4", {"group_size": 0}, r"proj: group size 0 of the configuration"),
        ("gptq-4", {"bits": 5}, r"bits=5, superl8 reads 2, 3, 4, 8"),
        ("gptq-4", {"bits": 8}, r"proj\.(scales|qzeros) has shape"),
        ("gptq-4", {"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin'"),
        ("gptq-4", {"dynamic": {r"-:.*proj": {}}}, r"proj\.qweight is quantised, but dynamic"),
        ("auto-round", {"packing_format": "auto_round:exotic"}, r"packing_format 'auto_round:exotic'"),
        ("auto-round", {"extra_config": {"layers.0.proj": {"bits": 16}}}, r"proj\.qweight is quantised, but dynamic"),
        ("auto-round", {"extra_config": {r"layers\.\d": {"group_size": 64}}}, r"scales has shape .* groups of 64"),
        ("awq", {"version": "gemv"}, r"AWQ version 'gemv'"),
        ("awq", {"bits": 3}, r"AWQ with 3 bits"),
        ("fp8-block", {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ("modelopt-nvfp4", {"quant_algo": "W4A8_AWQ"}, r"quant_algo W4A8_AWQ"),
        ("ct-w8a8", {"config_groups": {}}, r"proj\.weight is quantised, but no entry of config_groups"),
        ("ct-w8a8", {"ignore": ["re:.*proj"]}, r"proj\.weight is quantised, but the configuration's ignore says"),
        ("ct-w8a8", {"format": "marlin-24"}, r"proj: compressed-tensors format 'marlin-24'"),
        ("ct-w8a8", {"transform_config": {"config_groups": {}}}, r"transform_config"),
        ("ct-w8a8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"format 'sparse-24-bitmask'"),
    ],
)  # fmt: skip
def test_contradictory_configurations_are_refused(name, settings, message):
    scheme = tiny_stored.SCHEMES[name]
    tensors, _ = scheme.pack(weight())
    config = {**scheme.config, **settings}
    with pytest.raises(ValueError, match=message):
        reader(config)(config, headers(tensors))


def test_named_targets_go_before_classes():
    scheme = tiny_stored.SCHEMES["ct-w8a8"]
    tensors, _ = scheme.pack(weight())
    other = {"targets": ["re:.*other"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    ours = {"targets": ["re:.*proj"], "weights": tiny_stored.CHANNEL}
    everything = {"targets": ["Linear"], "weights": {"num_bits": 4}}
    config = {**scheme.config, "config_groups": {"a": everything, "b": other, "c": ours}}
    (matrix,) = reader(config)(config, headers(tensors)).values()
    assert matrix.bits == 8 and matrix.group_size == -1


def test_auto_rounds_settings_of_other_modules_leave_one_alone():
    scheme = tiny_stored.SCHEMES["auto-round"]
    tensors, _ = scheme.pack(weight())
    config = {**scheme.config, "extra_config": {"layers.0.pro": {"bits": 16}, r"layers\.1\..*": {"group_size": 64}}}
    (matrix,) = reader(config)(config, headers(tensors)).values()
    assert matrix.bits == 4 and matrix.group_size == 128


def test_unknown_schemes_have_no_reader():
    assert reader({"quant_method": "aqlm"}) is None
    assert reader({}) is None
