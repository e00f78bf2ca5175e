# SPDX-License-Identifier: BSD-3-Clause
"""superl8 convert and superl8 verify, as commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import gguf
import pytest
import tiny_gguf
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from vllm_superl8.checkpoint import gguf_snapshot
from vllm_superl8.checkpoint.superl8_decode import decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.formats import int8
from vllm_superl8.quant.container import convert as conversion
from vllm_superl8.quant.container import verify as verification
from vllm_superl8.quant.container.convert import Recipe, quantize, stages
from vllm_superl8.quant.container.source import open_source
from vllm_superl8.tools import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints in bfloat16, written once."""
    root = tmp_path_factory.mktemp("sources")

    def get(name):
        if not (root / name).exists():
            tiny.write(name, root / name)
            path = root / name / "model.safetensors"
            save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, {"format": "pt"})
            (root / name / "tokenizer.json").write_text('{"a": 1}')
            (root / name / "modeling.py").write_text("raise SystemExit")
        return root / name

    return get


@pytest.fixture
def target(tmp_path):
    return tmp_path / "m.superl8"


def convert(*arguments) -> int:
    return cli.main(["convert", *map(str, arguments)])


def verify(*arguments) -> int:
    return cli.main(["verify", *map(str, arguments)])


def facts(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.parametrize("variant", ["footer", "front"])
@pytest.mark.parametrize(("name", "group"), [("llama", -1), ("llama", 128), ("qwen3_moe", 128)])
def test_convert_quantises_linear_layers_and_keeps_the_rest(folders, target, name, group, variant):
    source = folders(name)
    before = facts(source)
    assert convert(source, target, "--group", group, "--variant", variant) == 0
    assert facts(source) == before
    file, values = Superl8File(target), load_file(source / "model.safetensors")
    assert file.header.variant == variant
    assert set(file.header.tensors) - file.header.scales == set(values)
    quantised = 0
    for key, value in values.items():
        blob = file.header.tensors[key]
        if key.endswith("_proj.weight"):
            quantised += 1
            one_scale = group == -1 or value.shape[1] % 128
            assert blob.scheme == ("per_row_i8" if one_scale else "per_group_i8")
            codes, scales = int8.quantize(value, -1 if one_scale else 128)
            assert torch.equal(file.tensor(key), codes) and torch.equal(file.scales(key), scales)
        else:
            assert blob.scheme == "raw" and torch.equal(file.tensor(key), value)
    assert quantised > 20
    assert file.header.meta["config"] == json.loads((source / "config.json").read_text())
    assert set(file.header.files) == {"config.json", "generation_config.json", "tokenizer.json"}
    assert os.listdir(target.parent) == ["m.superl8"]


def test_convert_lists_stages_and_experts(folders, target):
    assert convert(folders("qwen3_moe"), target, "--pp-stages", 2) == 0
    header = Superl8File(target).header
    first, second = map(set, header.pp_stages)
    assert first | second == set(header.tensors) and not first & second
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in second
    assert all(".layers.2." not in name for name in first)
    assert len(header.experts) == 3 * 8
    assert set(header.experts["1.3"]) == {
        f"model.layers.1.mlp.experts.3.{part}_proj.weight{end}"
        for part in ("gate", "up", "down")
        for end in ("", "_scale")
    }


def test_stages_of_a_model_without_layers_lose_nothing():
    assert stages(["a.weight"], 3) == [[], [], ["a.weight"]]


def test_modules_can_be_kept_in_16_bit(folders, target):
    assert convert(folders("llama"), target, "--keep", "*.down_proj", "--keep", r"re:.*layers\.0\.self_attn") == 0
    header = Superl8File(target).header
    raw = {name for name, blob in header.tensors.items() if blob.scheme == "raw"} - header.scales
    projections = {name for name in raw if "_proj" in name}
    assert projections == {
        *(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)),
        *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    }


def test_sixteen_bits_are_the_checkpoint(folders, target):
    assert convert(folders("llama"), target, "--bits", 16) == 0
    assert {blob.scheme for blob in Superl8File(target).header.tensors.values()} == {"raw"}


def test_gguf_files_are_converted_in_groups(tmp_path, target, monkeypatch, capsys):
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "cache")
    model = tiny_gguf.model("qwen2")
    source = tiny_gguf.write(tmp_path / "m.gguf", model, "qwen2")
    assert convert(source, target) == 0
    assert capsys.readouterr().out.strip() == str(target)
    file = Superl8File(target)
    assert {"config.json", "tokenizer.json"} <= set(file.header.files)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert file.header.tensors[name].group_size == 128
    error = decode(file, name) - model.state_dict()[name]
    assert error.norm() < 0.01 * decode(file, name).norm()


@pytest.mark.parametrize("group", [-1, 128])
@pytest.mark.parametrize("k", [100, 128, 200])
def test_parts_of_a_matrix_are_quantised_as_the_whole(monkeypatch, group, k):
    weight = torch.randn(37, k)
    whole = quantize(weight, group)
    monkeypatch.setattr(conversion, "CHUNK_VALUES", 5 * k)
    assert all(torch.equal(a, b) for a, b in zip(quantize(weight, group), whole, strict=True))


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate", "m.layers.0.mlp.shared_expert_gate",
                                  "model.embed_tokens", "transformer.wte", "model.layers.1.conv1d"])  # fmt: skip
def test_what_vllm_does_not_quantise_stays(name):
    assert Recipe().scheme(f"{name}.weight", (64, 64)) == ("raw", -1)


def test_shapes_that_no_kernel_takes_stay():
    assert Recipe().scheme("a.up_proj.weight", (64, 66)) == ("raw", -1)
    assert Recipe().scheme("a.up_proj.weight", (1, 64)) == ("raw", -1)
    assert Recipe().scheme("a.up_proj.bias", (64,)) == ("raw", -1)
    assert Recipe().scheme("a.up_proj.weight", (64, 64)) == ("per_row_i8", -1)


def test_four_bits_take_groups_that_divide_k():
    recipe = Recipe(4, 128)
    assert recipe.scheme("a.up_proj.weight", (8, 256)) == ("per_group_i4", 128)
    assert recipe.scheme("a.up_proj.weight", (8, 192)) == ("per_group_i4", 64)
    assert recipe.scheme("a.up_proj.weight", (8, 96)) == ("per_group_i4", 32)
    assert recipe.scheme("a.up_proj.weight", (8, 100)) == ("per_group_i8", 128)
    assert recipe.scheme("m.layers.0.mlp.experts.1.up_proj.weight", (8, 100)) == ("per_row_i8", -1)
    with pytest.raises(ValueError, match="4 bits have groups of 32, 64 or 128"):
        Recipe(4, -1)


def test_four_bits_are_twos_complement(folders, target, capsys):
    assert convert(folders("llama"), target, "--bits", 4) == 0
    file, values = Superl8File(target), load_file(folders("llama") / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    blob = file.header.tensors[name]
    assert (blob.scheme, blob.codebook, blob.group_size) == ("per_group_i4", "int4", 128)
    groups = values[name].float().unflatten(1, (-1, 128))
    codes = torch.round(groups / (groups.abs().amax(-1, keepdim=True) / 7)).flatten(1).to(torch.int8)
    packed = (codes[:, ::2] & 15).to(torch.uint8) | (codes[:, 1::2] & 15).to(torch.uint8) << 4
    assert torch.equal(file.tensor(name), packed)
    assert verify(target, "--source", folders("llama"), "--min-sqnr", 15) == 0
    assert verify(target, "--source", folders("llama"), "--min-sqnr", 35) == 1


def test_blocks_of_a_gguf_file_can_be_kept(tmp_path, target, monkeypatch):
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "cache")
    kind = gguf.GGMLQuantizationType.Q4_1
    source = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("llama"), "llama", kind)
    assert convert(source, target, "--blocks") == 0
    file = Superl8File(target)
    kept = [blob for blob in file.header.tensors.values() if blob.scheme == "gguf_kquant"]
    assert len(kept) == 21 and {blob.codebook for blob in kept} == {"Q4_1"}
    assert file.header.tensors["model.embed_tokens.weight"].scheme == "raw"
    assert verify(target, "--source", source, "--min-sqnr", 40) == 0  # but for the source's 16-bit values, the same


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config.json: it cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "it is no JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "cannot be read as safetensors"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safetensors: it is named in model.safetensors.index.json and missing",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
            r"quantised already \(gptq\)",
        ),
    ],
)
def test_convert_refuses_what_is_no_checkpoint(tmp_path, target, capsys, break_it, match):
    tiny.write("llama", tmp_path / "source")
    break_it(tmp_path / "source")
    assert convert(tmp_path / "source", target) == 1
    assert re.search(match, capsys.readouterr().err)
    assert not target.exists()


def test_convert_refuses_values_that_are_no_numbers(tmp_path, target, capsys):
    tiny.write("llama", tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    values = load_file(path)
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(values, path, {"format": "pt"})
    assert convert(tmp_path / "source", target) == 1
    assert "tensor model.layers.1.mlp.up_proj.weight of the source has NaN" in capsys.readouterr().err
    assert not target.exists()


SLOWLY = """
import sys, time
from vllm_superl8.quant.container import convert
from vllm_superl8.tools import cli
add = convert._add
def slowly(writer, name, *rest):
    time.sleep(0.05)
    size = add(writer, name, *rest)
    print(name, flush=True)
    return size
convert._add = slowly
sys.exit(cli.main(["convert", *sys.argv[1:]]))
"""


def test_a_killed_conversion_goes_on(folders, target, monkeypatch):
    command = [sys.executable, "-c", SLOWLY, str(folders("llama")), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(8):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists() and target.with_name("m.superl8.partial").exists()
    added = []
    add = conversion._add
    monkeypatch.setattr(conversion, "_add", lambda writer, name, *rest: added.append(name) or add(writer, name, *rest))
    assert convert(folders("llama"), target) == 0
    total = len(load_file(folders("llama") / "model.safetensors"))
    assert 0 < len(added) <= total - 7
    whole = target.read_bytes()
    assert convert(folders("llama"), target.with_name("again.superl8")) == 0
    header = Superl8File(target).header
    again = Superl8File(target.with_name("again.superl8"))
    assert header.tensors == again.header.tensors and len(whole) == target.stat().st_size
    assert verify(target, "--source", folders("llama")) == 0


def test_a_changed_source_begins_anew(folders, target, tmp_path, monkeypatch):
    tiny.write("llama", tmp_path / "source")

    def stop(name, nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversion.convert(open_source(tmp_path / "source"), target, Recipe(), advance=stop)
    assert target.with_name("m.superl8.partial").exists()
    time.sleep(0.01)
    path = tmp_path / "source" / "model.safetensors"
    save_file({name: value * 2 for name, value in load_file(path).items()}, path, {"format": "pt"})
    assert convert(tmp_path / "source", target) == 0
    assert verify(target, "--source", tmp_path / "source") == 0


def test_verify_lists_the_layers_below_the_bar(folders, target, capsys):
    assert convert(folders("llama"), target) == 0
    assert verify(target, "--source", folders("llama"), "--min-sqnr", 30) == 0
    assert "21 quantised tensors" in capsys.readouterr().out
    assert verify(target, "--source", folders("llama"), "--min-sqnr", 60) == 1
    errors = capsys.readouterr().err
    assert errors.count("below 60 dB") == 21
    assert "model.layers.2.mlp.down_proj.weight (per_row_i8): below 60 dB" in errors


def test_verify_finds_another_source(folders, target, tmp_path, capsys):
    assert convert(folders("llama"), target) == 0
    other = tmp_path / "other"
    tiny.write("llama", other)
    path = other / "model.safetensors"
    values = {key: value.bfloat16() for key, value in load_file(path).items()}
    values["model.norm.weight"][3] += 1
    values["model.layers.0.mlp.up_proj.weight"] *= -1
    values["extra.weight"] = torch.ones(2)
    del values["model.layers.1.mlp.up_proj.weight"]
    save_file(values, path, {"format": "pt"})
    report = tmp_path / "report.json"
    assert verify(target, "--source", other, "--min-sqnr", 20, "--json", report) == 1
    errors = capsys.readouterr().err
    assert "model.norm.weight (raw): raw and not equal to the source" in errors
    assert "model.layers.0.mlp.up_proj.weight (per_row_i8): below 20 dB" in errors
    assert "extra.weight (-): missing in the file" in errors
    assert "model.layers.1.mlp.up_proj.weight (per_row_i8): missing in the source" in errors
    assert sum(bool(row["problem"]) for row in json.loads(report.read_text())) == 4


def test_verify_finds_damage(folders, target, capsys):
    assert convert(folders("llama"), target) == 0
    blob = Superl8File(target).header.tensors["model.layers.0.mlp.up_proj.weight"]
    data = bytearray(target.read_bytes())
    data[blob.offset + 17] ^= 1
    target.write_bytes(data)
    assert verify(target) == 1
    assert "tensor model.layers.0.mlp.up_proj.weight has CRC" in capsys.readouterr().err


def test_verify_refuses_a_bar_without_a_source(target, capsys):
    assert verify(target, "--min-sqnr", 20) == 1
    assert "name it with --source" in capsys.readouterr().err


def test_sqnr_is_ten_times_the_logarithm_of_powers(monkeypatch):
    want = torch.randn(1000)
    monkeypatch.setattr(verification, "CHUNK_ROWS_VALUES", 300)
    assert verification.sqnr_db(want * 1.1, want) == pytest.approx(20, abs=1e-4)
    assert verification.sqnr_db(want, want) == float("inf")
    assert not verification.sqnr_db(want / 0, want) > -1e9
    assert verification.sqnr_db(torch.ones(3), torch.zeros(3)) == float("-inf")
