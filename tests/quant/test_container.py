# SPDX-License-Identifier: BSD-3-Clause
"""``.superl8`` files through vLLM: what convert writes is served exactly as the checkpoint quantised online."""

import json
import shutil
from types import SimpleNamespace

import gguf
import pytest
import tiny_gguf
import torch
from models import tiny
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from vllm_superl8.checkpoint import gguf_snapshot, superl8_snapshot
from vllm_superl8.checkpoint.superl8_decode import decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer
from vllm_superl8.formats import int8
from vllm_superl8.quant.container.convert import Recipe, convert, quantize
from vllm_superl8.quant.container.engine_args import LOAD_FORMAT, prepare
from vllm_superl8.quant.container.layers import Layers, group_size_of
from vllm_superl8.quant.container.source import open_source
from vllm_superl8.quant.stored import StoredInt4LinearMethod, StoredInt8LinearMethod

from engine import engine, prompt_logprobs


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setattr(superl8_snapshot, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "gguf-cache")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny checkpoints in bfloat16 by name, written once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(name):
        if not (folder / name).exists():
            tiny.write(name, folder / name)
            path = folder / name / "model.safetensors"
            save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, {"format": "pt"})
            config = json.loads((folder / name / "config.json").read_text())
            (folder / name / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        return folder / name

    return get


def converted(source, target, **recipe):
    convert(open_source(source), target, Recipe(**recipe))
    return target


def served(model, **options) -> torch.Tensor:
    settings = {"quantization": "superl8", "skip_tokenizer_init": True, **options}
    with engine(model, **settings) as llm:
        return prompt_logprobs(llm, tiny.tokens(60))


@pytest.mark.parametrize(("name", "group"), [("llama", 128), ("qwen3_moe", -1)])
def test_converted_model_equals_online_quantisation(tmp_path, checkpoints, name, group):
    source = checkpoints(name)
    online = served(source, additional_config={"superl8": {"activation": "token" if group == -1 else "group128"}})
    file = converted(source, tmp_path / "m.superl8", group=group)
    assert file.stat().st_size < (source / "model.safetensors").stat().st_size * 0.85
    assert torch.equal(served(file), online)


def test_blocks_of_a_gguf_file_are_served_as_the_file(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    source = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("llama"), "llama", kind)
    convert(open_source(source, blocks=True), tmp_path / "m.superl8", Recipe(blocks=True))
    options = {"skip_tokenizer_init": False}
    vocabulary = {"superl8": {"ignore": ["lm_head", "model.embed_tokens"]}}  # .superl8 files serve it in 16 bit
    file = served(tmp_path / "m.superl8", **options)
    assert torch.equal(file, served(source, additional_config=vocabulary, **options))


def test_four_bit_model_is_near_its_own_values(tmp_path, checkpoints):
    file = converted(checkpoints("llama"), tmp_path / "m.superl8", bits=4, group=128)
    stored, folder = Superl8File(file), tmp_path / "decoded"
    shutil.copytree(checkpoints("llama"), folder)
    names = set(stored.header.tensors) - stored.header.scales
    save_file({name: decode(stored, name) for name in names}, folder / "model.safetensors", {"format": "pt"})
    got = served(file, dtype="float32")
    want = served(folder, dtype="float32", additional_config={"superl8": {"ignore": ["*"]}})
    kld = (want.exp() * (want - got)).sum(-1).mean()
    print(f"mean KLD of W4A8 from its own 4-bit weights: {kld:.2e}")
    assert kld < 5e-3  # int8 activations alone; measured 4e-4


def arguments(model, **options):
    return EngineArgs(model=str(model), **options)


@pytest.fixture
def gguf_file(tmp_path):
    """A container made from a GGUF file, which brings a tokenizer along."""
    source = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.model("qwen2"), "qwen2")
    return converted(source, tmp_path / "tiny.superl8", group=128)


def test_prepare_points_vllm_to_folder_file_and_loader(gguf_file, tmp_path):
    args = arguments(gguf_file)
    prepare(args)
    assert (args.model_weights, args.load_format, args.quantization) == (str(gguf_file), LOAD_FORMAT, "superl8")
    assert args.served_model_name == [str(gguf_file)]
    folder = next((tmp_path / "cache").iterdir())
    assert args.model == str(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    before = dict(vars(args))
    prepare(args)
    assert vars(args) == before


def test_a_file_by_another_name_is_known_by_its_bytes(gguf_file):
    other = gguf_file.rename(gguf_file.with_suffix(".bin"))
    args = arguments(other)
    prepare(args)
    assert args.load_format == LOAD_FORMAT


def test_prepare_leaves_other_models_alone(tmp_path):
    for model in (str(tmp_path), "organisation/model"):
        args = arguments(tmp_path)
        args.model = model
        before = dict(vars(args))
        prepare(args)
        assert vars(args) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 does not read it"),
        ({"load_format": "safetensors"}, "--load-format safetensors does not read it"),
    ],
)
def test_prepare_refuses_contradictions(gguf_file, options, match):
    with pytest.raises(ValueError, match=match):
        prepare(arguments(gguf_file, **options))


def test_prepare_refuses_files_that_are_missing_or_lack_something(tmp_path, checkpoints):
    with pytest.raises(ValueError, match="there is no such file"):
        args = arguments(tmp_path)
        args.model = str(tmp_path / "none.superl8")
        prepare(args)
    with Superl8Writer(tmp_path / "bare.superl8") as writer:
        writer.add("a", torch.ones(1))
    with pytest.raises(ContainerError, match="no model configuration"):
        prepare(arguments(tmp_path / "bare.superl8"))
    file = converted(checkpoints("llama"), tmp_path / "m.superl8")
    with pytest.raises(ValueError, match="no tokenizer in it; give one with --tokenizer"):
        prepare(arguments(file))


def test_old_files_have_their_configuration_in_the_header_alone(tmp_path):
    with Superl8Writer(tmp_path / "old.superl8") as writer:
        writer.add("a", torch.ones(1))
        writer.meta = {"arch": "llama", "config": {"model_type": "llama"}}
    folder = superl8_snapshot.snapshot(Superl8File(tmp_path / "old.superl8"))
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}


@pytest.mark.parametrize("name", ["../config.json", "/tmp/x", ".hidden", "a/b", ".."])
def test_files_cannot_leave_the_snapshot(tmp_path, name):
    with Superl8Writer(tmp_path / "m.superl8") as writer:
        writer.add_file("config.json", b"{}")
        writer.add_file(name, b"x")
    with pytest.raises(ContainerError, match="it holds a file called"):
        superl8_snapshot.snapshot(Superl8File(tmp_path / "m.superl8"))


class Header:
    """As much of a file as Layers looks at: name to (scheme, group size)."""

    def __init__(self, **schemes):
        self.scales = set()
        self.tensors = {
            name.replace("__", ".") + ".weight": SimpleNamespace(
                name=name.replace("__", ".") + ".weight",
                scheme=scheme,
                group_size=group_size,
                rotated=False,
                shape=(8, 64) if scheme == "per_group_i4" else (8, 136),
                codebook={"per_group_i4": "int4", "gguf_kquant": "q8_0"}.get(scheme),
            )
            for name, (scheme, group_size) in schemes.items()
        }


def ranks(monkeypatch, rank):
    """Be rank `rank` of two for vLLM's parameters."""
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 2)


def linear_layer(monkeypatch, widths, k_here, k, stored, group_size, rank):
    """(layer, method) as rank `rank` of two has it; rows are cut in halves where k is whole, else columns."""
    ranks(monkeypatch, rank)
    method = StoredInt8LinearMethod(("w",), stored, group_size, "a.layer")
    layer = torch.nn.Module()
    method.create_weights(layer, k_here, list(widths), k, 2 * sum(widths), torch.float32)
    return layer, method


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
ROW, GROUP, RAW = ("per_row_i8", None), ("per_group_i8", 128), ("raw", None)


@pytest.mark.parametrize(
    ("parts", "kind", "group_sizes"),
    [
        ((ROW, ROW, ROW), "int8", {"q_proj": -1, "k_proj": -1, "v_proj": -1}),
        ((ROW, ("per_chan_i8", None), ROW), "int8", {"q_proj": -1, "k_proj": -1, "v_proj": -1}),
        ((GROUP, GROUP, GROUP), "int8", {"q_proj": 128, "k_proj": 128, "v_proj": 128}),
        ((RAW, RAW, RAW), "raw", {}),
        ((RAW, ROW, ROW), "other", {}),
        ((("per_group_i8", 64),) * 3, "other", {}),
        ((("per_group_w3a8", 32),) * 3, "other", {}),
        ((("per_group_i4", 64),) * 3, "int4", {"q_proj": 64, "k_proj": 64, "v_proj": 64}),
        ((("per_group_i4", 16),) * 3, "other", {}),
        ((("per_group_i4", 64), GROUP, GROUP), "other", {}),
        ((("gguf_kquant", None),) * 3, "blocks", {"q_proj": -1, "k_proj": -1, "v_proj": -1}),
    ],
)
def test_fused_layers_are_told_by_their_parts(parts, kind, group_sizes):
    header = Header(**{f"model__a__{part}": given for part, given in zip(PACKED["qkv_proj"], parts, strict=True)})
    stored = Layers(header).linear("model.a.qkv_proj", PACKED)
    assert (stored.kind, stored.group_sizes) == (kind, group_sizes)
    assert stored.names == tuple(header.tensors)


def test_layers_that_the_file_does_not_have_are_not_quantised():
    assert Layers(Header(model__a__o_proj=ROW)).linear("model.b.o_proj", PACKED).kind == "raw"


def test_experts_are_found_below_their_layer():
    names = {f"m__mlp__experts__{e}__{p}_proj": ROW for e in (0, 1) for p in ("gate", "up", "down")}
    found = Layers(Header(**names, m__mlp__gate=RAW)).experts("m.mlp.experts.routed_experts")
    assert found.kind == "int8" and len(found.names) == 6
    assert found.group_sizes == {"gate_proj": -1, "up_proj": -1, "down_proj": -1}


def test_the_option_activation_is_honoured_or_refused():
    assert group_size_of({"a": -1}, "auto", "x") == -1
    assert group_size_of({"a": 128}, "auto", "x") == 128
    assert group_size_of({"a": -1}, "group128", "x") == 128
    with pytest.raises(ValueError, match="x is stored in groups of 128, which activation='token' cannot use"):
        group_size_of({"a": 128}, "token", "x")


@pytest.mark.parametrize(("stored", "group_size"), [(-1, -1), (-1, 128), (128, 128)])
@pytest.mark.parametrize("k", [256, 200])
@pytest.mark.parametrize("rank", [0, 1])
def test_stored_layers_multiply_their_part(monkeypatch, stored, group_size, k, rank):
    """Rows cut over two ranks, with the product of exactly these codes."""
    torch.manual_seed(1)
    n, x = 12, torch.randn(5, k)
    weight = torch.randn(2 * n, k) + 0.2
    codes, scales = quantize(weight, stored)
    layer, method = linear_layer(monkeypatch, (n,), k, k, stored, group_size, rank)
    layer.weight.load_column_parallel_weight(codes)
    layer.weight_scale.load_column_parallel_weight(scales)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    part = slice(rank * n, (rank + 1) * n)
    spread = scales.repeat_interleave(k if stored == -1 else stored, 1)[:, :k]
    kept = (codes.float() * spread)[part]
    assert torch.equal(method.dequantize_weight(layer), kept)
    padded = torch.nn.functional.pad(x, (0, -k % max(1, group_size)))
    rounded = int8.dequantize(*int8.quantize(padded, group_size))[:, :k]
    error = (method.apply(layer, x) - rounded @ kept.T).norm() / (rounded @ kept.T).norm()
    assert error < 1e-6


@pytest.mark.parametrize("stored", [-1, 128])
@pytest.mark.parametrize("rank", [0, 1])
def test_stored_layers_take_their_columns(monkeypatch, stored, rank):
    codes, scales = quantize(torch.randn(8, 512), stored)
    layer, _ = linear_layer(monkeypatch, (8,), 256, 512, stored, stored, rank)
    layer.weight.load_row_parallel_weight(codes)
    layer.weight_scale.load_row_parallel_weight(scales)  # one scale a row is copied whole
    assert torch.equal(layer.weight, codes[:, rank * 256 : (rank + 1) * 256])
    assert torch.equal(layer.weight_scale, scales if stored == -1 else scales[:, rank * 2 : rank * 2 + 2])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rows", [True, False])
def test_four_bit_layers_take_their_part(monkeypatch, rank, rows):
    ranks(monkeypatch, rank)
    weight = torch.randn(16, 256) + 0.2
    codes, scales = quantize(weight, 64, "per_group_i4")
    method, layer = StoredInt4LinearMethod(("w",), 64, "a.layer"), torch.nn.Module()
    n, k = (8, 256) if rows else (16, 128)
    method.create_weights(layer, k, [n], 256, 16, torch.float32)
    for parameter, value in ((layer.weight, codes), (layer.weight_scale, scales)):
        (parameter.load_column_parallel_weight if rows else parameter.load_row_parallel_weight)(value)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    groups = weight.unflatten(1, (4, 64))
    step = groups.abs().amax(-1, keepdim=True) / 7
    wanted = (torch.round(groups / step) * step).flatten(1)
    wanted = wanted[rank * 8 : rank * 8 + 8] if rows else wanted[:, rank * 128 : rank * 128 + 128]
    assert (method.dequantize_weight(layer) - wanted).abs().max() < 1e-6
    x = torch.randn(5, k)
    product = x @ wanted.T
    assert (method.apply(layer, x) - product).norm() / product.norm() < 0.02  # int8 activations


def test_groups_that_cannot_be_cut_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="512 columns in groups of 128, which cannot be cut into parts of 64"):
        linear_layer(monkeypatch, (8,), 64, 512, 128, 128, 0)
