# SPDX-License-Identifier: BSD-3-Clause
"""A model under torch.compile: its graph has the fused ops, its tokens are those of the layers one by one."""

import pytest
import transformers as tf

import tiny
from engine import engine, greedy

CONFIGS = {
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**tiny.COMMON, "num_hidden_layers": 1, "head_dim": 256},
        layer_types=["full_attention"],
        hidden_activation="gelu_pytorch_tanh",
    )
}

# vLLM turns its own compilation into a plain trace on CPUs, which its passes do not see; and of these passes it offers
# only those of CUDA.
COMPILATION = {
    "mode": 3,
    "backend": "inductor",
    "custom_ops": ["none"],
    "cudagraph_mode": "NONE",
    "compile_sizes": [],
    "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False, "fuse_attn_quant": False},
}


@pytest.fixture
def compiles_as_on_a_gpu(monkeypatch, tmp_path_factory):
    from vllm_superl8.platform.cpu import Superl8CpuPlatform

    check = Superl8CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config):
        compilation = vllm_config.compilation_config
        asked = compilation.mode
        check(vllm_config)
        if asked == COMPILATION["mode"]:
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked, "inductor", True

    monkeypatch.setattr(Superl8CpuPlatform, "check_and_update_config", staticmethod(check_and_keep))
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):  # passes do not run on cached graphs
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp("cache")))


def test_a_compiled_model_fuses_and_gives_the_same_tokens(compiles_as_on_a_gpu, tmp_path):
    from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass

    tiny.write("gemma3", tmp_path, CONFIGS)
    prompts = [tiny.tokens(20), tiny.tokens(33)]
    options = {"dtype": "bfloat16", "quantization": "superl8", "skip_tokenizer_init": True}
    with engine(tmp_path, **options) as llm:
        want = greedy(llm, prompts, max_tokens=8)
    VllmPatternMatcherPass.match_table.clear()
    with engine(tmp_path, **options, enforce_eager=False, compilation_config=COMPILATION) as llm:
        got = greedy(llm, prompts, max_tokens=8)
    # in front of the attention and of the MLP; the norms behind them, and the last one, have other readers
    assert VllmPatternMatcherPass.match_table == {"superl8_norm_quant_fusion": 2, "superl8_act_quant_fusion": 1}
    assert got == want
