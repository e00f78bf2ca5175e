# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a file arrive under the names, in the layout and with the values of the checkpoint it was made from."""

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf.constants import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_superl8.checkpoint.gguf_config import config_dict, hf_config
from vllm_superl8.checkpoint.gguf_header import read_model
from vllm_superl8.checkpoint.gguf_snapshot import snapshot
from vllm_superl8.quant.gguf import weights as gguf_weights
from vllm_superl8.quant.gguf.weights import check, weights
from vllm_superl8.tools.fetch import fetch

PARIS = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def opened(path):
    header = read_model(path)
    return header, hf_config(header, config_dict(header))


def checkpoint(built) -> dict[str, torch.Tensor]:
    """The state of a model as its published checkpoint has it: experts apart, no tied head."""
    tensors = {}
    for name, value in built.state_dict().items():
        layer, experts, which = name.partition(".experts.")
        if experts:
            for index, expert in enumerate(value):
                if which == "gate_up_proj":
                    gate, up = expert.chunk(2)
                    tensors[f"{layer}.experts.{index}.gate_proj.weight"] = gate
                    tensors[f"{layer}.experts.{index}.up_proj.weight"] = up
                else:
                    tensors[f"{layer}.experts.{index}.{which}.weight"] = expert
        elif name != "lm_head.weight" or not built.config.tie_word_embeddings:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", tiny_gguf.ARCHITECTURE)
def test_weights_are_those_of_the_checkpoint(tmp_path, name, tied):
    if name == "gemma3" and not tied:
        pytest.skip("Gemma 3 has no head of its own")
    built = tiny_gguf.model(name, tie_word_embeddings=tied)
    header, config = opened(tiny_gguf.write(tmp_path / "m.gguf", built, name))
    check(header, config)
    assert config.tie_word_embeddings is tied
    expected, got = checkpoint(built), dict(weights(header, config, torch.float32))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        # Gemma's norms lose the last bit where 1 was added.
        assert (got[key] - value).abs().max() < (1e-6 if "norm" in key else 1e-30), key


def test_biases_of_llama_are_in_the_checkpoints_order(tmp_path):
    built = tiny_gguf.model("llama", attention_bias=True, mlp_bias=True)
    header, config = opened(tiny_gguf.write(tmp_path / "m.gguf", built, "llama"))
    got = dict(weights(header, config, torch.float32))
    for key, value in built.state_dict().items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_quantised_weights_are_their_own_dequantisation(tmp_path, name, kind):
    built = tiny_gguf.model(name)
    header, config = opened(tiny_gguf.write(tmp_path / "m.gguf", built, name, kind))
    check(header, config)
    expected, got = checkpoint(built), dict(weights(header, config, torch.bfloat16))
    for key, value in expected.items():
        assert got[key].dtype == torch.bfloat16
        if value.ndim > 1 and "mlp.gate." not in key and ".self_attn." not in key:
            stored = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(value.numpy()), kind), kind)
            assert torch.equal(got[key], torch.from_numpy(stored.reshape(value.shape)).bfloat16()), key
        error = (got[key].float() - value).norm() / value.norm()
        assert error < (0.1 if kind == Type.Q4_1 else 0.01), key


def test_weights_are_read_one_at_a_time(tmp_path, monkeypatch):
    header, config = opened(tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("llama"), "llama"))
    reads = []
    monkeypatch.setattr(
        gguf_weights, "read", lambda tensor, dtype: reads.append(tensor.name) or torch.zeros(tensor.shape)
    )
    for count, _ in enumerate(weights(header, config, torch.bfloat16), start=1):
        assert len(reads) == count


def test_types_are_logged_with_what_becomes_of_them(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(gguf_weights.logger, "info", lambda text, *values: lines.append(text % values))
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("qwen2"), "qwen2", Type.Q4_1)
    header, config = opened(path)
    list(weights(header, config, torch.bfloat16))
    matrices = sum(len(tensor.shape) > 1 for tensor in header.tensors.values())
    kept = "kept as they are (kernels block_gemm_q4_1), in experts decoded to bfloat16"
    assert f"Q4_1: {matrices} tensors are {kept}" in lines
    plain = len(header.tensors) - matrices
    assert f"F32: {plain} tensors are taken in bfloat16, matrices of linear layers as Q8_0" in lines
    lines.clear()
    list(weights(header, config, torch.bfloat16, in_blocks=False))
    assert f"Q4_1: {matrices} tensors are decoded to bfloat16, by linear layers as int8" in "\n".join(lines)


def refused(path, match):
    header, config = opened(path)
    with pytest.raises(ValueError, match=match) as caught:
        check(header, config)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen3_moe"])
def test_check_refuses_a_tensor_without_a_place(tmp_path, name):
    def add(values):
        values["blk.1.attn_rot_embd.weight"] = np.ones((4, 32), np.float32)

    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model(name), name, change=add)
    refused(path, r"tensor blk\.1\.attn_rot_embd\.weight has no place in \w+ForCausalLM")


@pytest.mark.parametrize(
    "name,gone,said",
    [
        ("qwen2", "blk.2.attn_k.bias", "blk.2.attn_k.bias"),
        ("gemma3", "blk.2.post_ffw_norm.weight", "model.layers.2.post_feedforward_layernorm.weight"),
        ("qwen3_moe", "blk.2.ffn_up_exps.weight", "blk.2.ffn_up_exps.weight"),
    ],
)
def test_check_refuses_a_missing_tensor(tmp_path, name, gone, said):
    def drop(values):
        del values[gone]

    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model(name), name, change=drop)
    refused(path, f"tensor {said} is missing")


@pytest.mark.parametrize(
    "name,odd",
    [("qwen2", "ffn_down.weight"), ("gemma3", "attn_q_norm.weight"), ("qwen3_moe", "ffn_down_exps.weight")],
)
def test_check_refuses_a_tensor_of_another_shape(tmp_path, name, odd):
    def change(values):
        values[f"blk.0.{odd}"] = np.ascontiguousarray(values[f"blk.0.{odd}"][:-1])

    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model(name), name, change=change)
    refused(path, rf"tensor blk\.0\.{odd} has shape \[.*\], the file's metadata ask for \[")


def test_check_refuses_integer_tensors(tmp_path):
    def change(values):
        values["blk.0.attn_norm.weight"] = values["blk.0.attn_norm.weight"].astype(np.int32)

    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("qwen2"), "qwen2", change=change)
    refused(path, r"tensor blk\.0\.attn_norm\.weight has type I32, which the installed gguf package cannot decode")


@pytest.mark.parametrize(
    "model,prompt,tokens,nll",
    [
        ("smollm2", PARIS, [504, 3575, 282, 4649, 314, 7042, 30, 2], 3.5378),
        ("gemma3-270m", "The capital of France is", [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563], 3.4789),
    ],
    ids=["smollm2", "gemma3"],
)
def test_real_files_give_the_reference_tokens_and_likelihood(tmp_path, model, prompt, tokens, nll):
    """Reference: float32 forward passes over the dequantised weights, which agree with llama.cpp."""
    header = read_model(fetch(model))
    folder = snapshot(header, lambda config: check(header, config), cache=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = hf_config(header, config_dict(header))
    config.dtype = torch.float32
    built = AutoModelForCausalLM.from_config(config).eval()
    built.load_state_dict(dict(weights(header, config, torch.float32)), strict=False)
    built.tie_weights()
    ids = tokenizer.encode(prompt)
    out = built.generate(torch.tensor([ids]), max_new_tokens=len(tokens), do_sample=False, eos_token_id=None)
    assert out[0, len(ids) :].tolist() == tokens
    text = tokenizer.encode(tiny_gguf.TEXT)[:512]
    with torch.no_grad():
        logprobs = built(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    measured = -logprobs.gather(1, torch.tensor(text[1:])[:, None]).mean().item()
    assert abs(measured - nll) < 1e-3
