# SPDX-License-Identifier: BSD-3-Clause
"""A GGUF file named on the command line becomes a folder, weights and a loader; what the user chose stays."""

from pathlib import Path

import pytest
import tiny_gguf
import vllm_gguf_plugin.plugin as other_plugin
from gguf.constants import GGMLQuantizationType as Type
from vllm.config.load import LoadConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

from vllm_superl8.checkpoint import gguf_snapshot
from vllm_superl8.patches import create_model_config
from vllm_superl8.quant import gguf
from vllm_superl8.quant.gguf.engine_args import LOAD_FORMAT, is_reference, prepare


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path):
    return str(tiny_gguf.write(tmp_path / "tiny-Q8_0.gguf", tiny_gguf.model("qwen2"), "qwen2", Type.Q8_0))


def arguments(model, **options):
    return EngineArgs(model=model, **{"quantization": "superl8", **options})


def test_prepare_points_vllm_to_folder_file_and_loader(path, cache):
    args = arguments(path)
    prepare(args)
    assert (args.model_weights, args.load_format, args.quantization) == (path, LOAD_FORMAT, "superl8")
    assert args.model == str(next(cache.iterdir()))
    assert args.served_model_name == [path]
    assert (args.tokenizer, args.config_format) == (None, "auto")


def test_prepare_does_nothing_the_second_time(path):
    args = arguments(path)
    prepare(args)
    before = dict(vars(args))
    prepare(args)
    assert vars(args) == before


def test_prepare_keeps_what_the_user_chose(path, tmp_path):
    args = arguments(path, tokenizer=str(tmp_path), hf_config_path="cfg", served_model_name=["me"], load_format="dummy")
    prepare(args)
    assert (args.tokenizer, args.hf_config_path, args.served_model_name) == (str(tmp_path), "cfg", ["me"])
    assert args.load_format == "dummy"
    assert args.model.endswith("-no-tokenizer")


def test_prepare_takes_the_tokenizer_of_a_gguf_file(path, tmp_path):
    other = str(tiny_gguf.write(tmp_path / "other.gguf", tiny_gguf.model("llama"), "llama"))
    args = arguments(path, tokenizer=other)
    prepare(args)
    assert "/other-" in args.tokenizer and args.model.endswith("-no-tokenizer")
    same = arguments(path, tokenizer=path)
    prepare(same)
    assert same.tokenizer is None and not same.model.endswith("-no-tokenizer")


@pytest.mark.parametrize("quantization,ours", [("superl8", True), (None, True), ("gguf", False)])
def test_prepare_leaves_other_methods_alone(path, quantization, ours):
    args = arguments(path, quantization=quantization)
    prepare(args)
    assert (args.load_format == LOAD_FORMAT) is ours
    assert args.quantization == ("superl8" if ours else quantization)


def test_prepare_leaves_other_platforms_alone(path, monkeypatch):
    args, chosen = arguments(path, quantization=None), arguments(path)
    monkeypatch.setattr("vllm.platforms.current_platform", object())
    prepare(args)
    assert (args.model, args.load_format) == (path, "auto")
    prepare(chosen)
    assert chosen.load_format == LOAD_FORMAT


def test_prepare_leaves_other_models_alone(tmp_path):
    args = arguments(str(tmp_path))
    prepare(args)
    assert (args.model, args.load_format, args.served_model_name) == (str(tmp_path), "auto", None)


def test_prepare_resolves_a_folder_and_quantisation(path, tmp_path):
    args = arguments(f"{tmp_path}:Q8_0")
    prepare(args)
    assert (args.model_weights, args.served_model_name) == (path, [f"{tmp_path}:Q8_0"])


@pytest.mark.parametrize(
    "name,match",
    [
        ("absent.gguf", r"absent\.gguf: there is no such file"),
        ("{folder}/absent.gguf", r"absent\.gguf: there is no such file"),
        ("{folder}:Q4_K_M", "No GGUF file matching quant_type 'Q4_K_M'"),
    ],
)
def test_prepare_refuses_what_is_not_there(tmp_path, name, match):
    with pytest.raises(ValueError, match=match):
        prepare(arguments(name.format(folder=tmp_path)))


def test_prepare_refuses_other_loaders(path):
    with pytest.raises(ValueError, match="--load-format safetensors does not read GGUF"):
        prepare(arguments(path, load_format="safetensors"))


def test_damage_is_refused_before_vllm_looks(path, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(path).read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"broken\.gguf: .*cut short"):
        arguments(str(broken)).create_model_config()


@pytest.mark.parametrize("name", ["x.gguf", "org/repo:Q4_K_M", "org/repo/x.gguf"])
def test_references_pass_what_vllm_asks_the_hub(name, monkeypatch):
    """With HF_HUB_OFFLINE=1 vLLM looks for --model in the local cache of the hub."""
    gguf.register()
    assert is_reference(name)
    assert arg_utils.get_model_path(name, None) == name
    probe = arg_utils.maybe_override_with_speculators
    assert probe(model=name, tokenizer="t", trust_remote_code=False, vllm_speculative_config={"a": 1}) == (
        name,
        "t",
        {"a": 1},
    )


@pytest.mark.parametrize("name", ["org/repo", "org/repo:latest", "", None, "s3://bucket/model"])
def test_other_names_are_no_references(name):
    assert not is_reference(name)


def test_a_gguf_file_may_have_any_name(path, tmp_path):
    other = tmp_path / "weights.bin"
    other.write_bytes(Path(path).read_bytes())
    assert is_reference(str(other))
    args = arguments(str(other))
    prepare(args)
    assert args.model_weights == str(other)


@pytest.fixture
def fresh(monkeypatch):
    """EngineArgs as vLLM ships it, its ModelConfig replaced by a record of the arguments."""
    record = []
    monkeypatch.setattr(EngineArgs, "create_model_config", lambda self: record.append(dict(vars(self))))
    monkeypatch.setattr(EngineArgs, "_gguf_create_model_config_patched", False, raising=False)
    monkeypatch.setattr(create_model_config, "_installed", None)
    return record


ORDERS = {
    "ours": [gguf.register],
    "ours-twice": [gguf.register, gguf.register],
    "theirs-first": [other_plugin._patch_engine_args, gguf.register],
    "theirs-later": [gguf.register, other_plugin._patch_engine_args],
    "theirs-between": [gguf.register, other_plugin._patch_engine_args, gguf.register],
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_with_the_other_plugins_patch(fresh, path, order):
    for patch in ORDERS[order]:
        patch()
    arguments(path).create_model_config()
    made = fresh[0]
    assert (made["model_weights"], made["load_format"], made["quantization"]) == (path, LOAD_FORMAT, "superl8")
    assert "/cache/tiny-Q8_0-" in made["model"]
    assert (made["served_model_name"], made["config_format"], made["tokenizer"]) == ([path], "auto", None)


@pytest.mark.parametrize("order", ["theirs-first", "theirs-between"])
def test_method_may_be_left_out_on_our_platform(fresh, path, order):
    for patch in ORDERS[order]:
        patch()
    arguments(path, quantization=None).create_model_config()
    assert (fresh[0]["load_format"], fresh[0]["quantization"]) == (LOAD_FORMAT, "superl8")


def test_other_plugins_method_still_reaches_it(fresh, path):
    for patch in ORDERS["theirs-between"]:
        patch()
    arguments(path, quantization="gguf").create_model_config()
    assert (fresh[0]["load_format"], fresh[0]["quantization"]) == ("gguf", "gguf")


def test_register_adds_one_layer_only(fresh):
    gguf.register()
    once = EngineArgs.create_model_config
    gguf.register()
    assert EngineArgs.create_model_config is once


def test_loader_is_registered_and_takes_no_extra_config():
    gguf.register()
    loader = get_model_loader(LoadConfig(load_format=LOAD_FORMAT))
    assert type(loader).__name__ == "GgufModelLoader"
    with pytest.raises(ValueError, match="takes no --model-loader-extra-config"):
        get_model_loader(LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={"a": 1}))


def test_vllms_model_config_has_the_files_values(path):
    config = arguments(path, max_model_len=None).create_model_config()
    assert (config.max_model_len, config.served_model_name, str(config.dtype)) == (1024, path, "torch.bfloat16")
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert config.try_get_generation_config()["eos_token_id"] == [2]
