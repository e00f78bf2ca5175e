# SPDX-License-Identifier: BSD-3-Clause
"""config.json and generation_config.json made from metadata are those of the model that was converted."""

from dataclasses import replace

import gguf
import pytest
import tiny_gguf
import torch

from vllm_superl8.checkpoint.gguf_config import ARCHITECTURES, config_dict, generation_dict, hf_config
from vllm_superl8.checkpoint.gguf_header import read_model
from vllm_superl8.checkpoint.gguf_rope import llama3_factors
from vllm_superl8.tools.fetch import fetch

UNSTATED = {"_name_or_path", "architectures", "dtype", "initializer_range", "rms_norm_eps", "head_dim"}
"""Fields that a file does not hold, or holds in another form."""


def header_of(tmp_path, name="qwen2", changes=None, **options):
    built = tiny_gguf.model(name, **(changes or {}))
    return built, read_model(tiny_gguf.write(tmp_path / f"{name}.gguf", built, name, **options))


def with_metadata(header, **changes):
    metadata = {**header.metadata, **{key.replace("__", "."): value for key, value in changes.items()}}
    return replace(header, metadata={key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize("name", tiny_gguf.ARCHITECTURE)
def test_config_is_that_of_the_converted_model(tmp_path, name):
    built, header = header_of(tmp_path, name)
    ours, theirs = hf_config(header, config_dict(header)).to_dict(), built.config.to_dict()
    assert {key: ours.get(key) for key in theirs if key not in UNSTATED} == {
        key: value for key, value in theirs.items() if key not in UNSTATED
    }
    assert ours["architectures"] == [type(built).__name__]
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])
    assert ours["head_dim"] == (theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"])


def test_every_architecture_is_tested():
    assert set(ARCHITECTURES) == set(tiny_gguf.ARCHITECTURE.values())


def test_smollm2_config():
    header = read_model(fetch("smollm2"))
    config = hf_config(header, config_dict(header))
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.bfloat16
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert generation_dict(header)["eos_token_id"] == [2]  # <|im_end|>


def test_gemma3_config():
    header = read_model(fetch("gemma3-270m"))
    config = hf_config(header, config_dict(header))
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (18, 640, 262144)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.sliding_window, config.query_pre_attn_scalar, config.tie_word_embeddings) == (512, 256, True)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert config.final_logit_softcapping is None
    assert generation_dict(header) == {"bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def add_llama3(values):
    values["rope_freqs.weight"] = llama3_factors(16, 1e4, 8.0).float().numpy()


def add_scaling(kind, original=None):
    def add(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        if original:
            writer.add_rope_scaling_orig_ctx_len(original)

    return add


@pytest.mark.parametrize(
    "options,expected",
    [
        ({"change": add_llama3}, LLAMA3),
        (
            {"extra": add_scaling(gguf.RopeScalingType.LINEAR)},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        (
            {"extra": add_scaling(gguf.RopeScalingType.YARN, 256)},
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        ({"extra": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)}, None),
    ],
    ids=["llama3", "linear", "yarn", "none"],
)
def test_rope_scaling_is_kept(tmp_path, options, expected):
    _, header = header_of(tmp_path, "llama", **options)
    assert config_dict(header)["rope_parameters"] == (expected or {"rope_type": "default", "rope_theta": 1e4})


def test_llama3_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=32, hidden_size=128, num_attention_heads=4, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1e4 ** (-torch.arange(16) / 16)
    assert (plain / scaled / llama3_factors(16, 1e4, 8.0) - 1).abs().max() < 1e-5


def test_gemma3_scales_only_layers_without_a_window(tmp_path):
    _, header = header_of(tmp_path, "gemma3", extra=add_scaling(gguf.RopeScalingType.LINEAR))
    parameters = config_dict(header)["rope_parameters"]
    assert parameters["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    assert parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "stored,full", [(None, []), (2, [1, 3]), ([True, True, True, False], [3])], ids=["default", "period", "list"]
)
def test_gemma3_window_pattern(tmp_path, stored, full):
    _, header = header_of(tmp_path, "gemma3")
    header = with_metadata(header, gemma3__attention__sliding_window_pattern=stored)
    kinds = config_dict(header)["layer_types"]
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == full


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_bias_follows_the_tensors(tmp_path, name):
    _, header = header_of(tmp_path, name, changes={"attention_bias": True})
    assert config_dict(header)["attention_bias"] is True


def test_half_precision_of_the_file_is_the_dtype(tmp_path):
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("F32", "bfloat16")):
        _, header = header_of(tmp_path, kind=gguf.GGMLQuantizationType[kind])
        assert config_dict(header)["dtype"] == dtype


def test_text_ends_where_the_template_ends_a_turn(tmp_path):
    _, header = header_of(tmp_path, extra=lambda writer: writer.add_eot_token_id(9))
    stated = with_metadata(header, tokenizer__ggml__eos_token_id=0)
    assert generation_dict(stated)["eos_token_id"] == [0, 9, tiny_gguf.SPECIAL.index("<|im_end|>")]
    without = with_metadata(stated, tokenizer__chat_template=None, tokenizer__ggml__eot_token_id=None)
    assert generation_dict(without)["eos_token_id"] == [0]


def test_sampling_defaults_are_kept(tmp_path):
    def add(writer):
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    _, header = header_of(tmp_path, extra=add)
    generation = generation_dict(header)
    assert (generation["temperature"], generation["top_k"], generation["do_sample"]) == (0.5, 20, True)


@pytest.mark.parametrize(
    "change,match",
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not served; superl8 serves llama, qwen2"),
        ({"general__architecture": None}, "architecture None is not served"),
        ({"qwen2__embedding_length": None}, "qwen2.embedding_length is missing"),
        ({"qwen2__embedding_length": 64}, r"token_embd.weight has shape \[512, 128\], embedding_length is 64"),
        ({"qwen2__embedding_length": "128"}, "qwen2.embedding_length is '128', a whole number from 1 was expected"),
        ({"qwen2__block_count": 4}, "block_count is 4 but the file has tensors of 3 blocks"),
        ({"qwen2__block_count": (1 << 32) - 1}, "a whole number from 1 was expected"),
        ({"qwen2__attention__head_count": 0}, "a whole number from 1 was expected"),
        ({"qwen2__attention__head_count_kv": [2, 1, 2]}, "differs from layer to layer"),
        ({"qwen2__attention__value_length": 16}, "attention.value_length is 16 and the size of a head 32"),
        ({"qwen2__attention__layer_norm_rms_epsilon": float("nan")}, "a number above 0 was expected"),
        ({"qwen2__rope__freq_base": -1.0}, "qwen2.rope.freq_base is -1.0, a number above 0"),
        ({"qwen2__rope__scaling__type": "longrope", "qwen2__rope__scaling__factor": 2.0}, "'longrope' is not served"),
        ({"qwen2__rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor is not understood"),
        ({"tokenizer__ggml__eos_token_id": 512}, "eos_token_id is 512, an id below 512 was expected"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of strings"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_config_refuses(tmp_path, change, match):
    _, header = header_of(tmp_path)
    with pytest.raises(ValueError, match=match) as caught:
        config_dict(with_metadata(header, **change))
    assert "qwen2.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_config_refuses_other_frequency_factors(tmp_path):
    def change(values):
        add_llama3(values)
        values["rope_freqs.weight"][3] = 2

    _, header = header_of(tmp_path, "llama", change=change)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight holds frequency factors that are not Llama 3's"):
        config_dict(header)


def test_config_refuses_mixtral(tmp_path):
    _, header = header_of(tmp_path, "llama", extra=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ValueError, match="Mixtral experts are not served"):
        config_dict(header)


def test_config_refuses_what_transformers_refuses_in_one_line(tmp_path):
    _, header = header_of(tmp_path, "gemma3")
    with pytest.raises(ValueError, match="transformers refuses its configuration: The hidden size") as caught:
        hf_config(header, {**config_dict(header), "num_attention_heads": 3})
    assert "\n" not in str(caught.value)
