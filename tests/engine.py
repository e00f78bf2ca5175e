# SPDX-License-Identifier: BSD-3-Clause
"""A vLLM engine inside the test process: started, asked and taken down again."""

import contextlib
import gc
import math
import os

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

KV_CACHE_BYTES = 64 << 20


@contextlib.contextmanager
def engine(model, **options):
    """An LLM on `model` with small caches; options override."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {
        "model": str(model),
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.1,  # several tests may share a card
        "disable_log_stats": True,
        "max_logprobs": -1,
        "seed": 0,
        **options,
    }
    llm = LLM(**settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompt_logprobs(llm, token_ids, top=None) -> torch.Tensor:
    """Log-probabilities (len - 1, vocab) that the engine gives the token after each prefix of token_ids.

    With top=k only the k best and the true token are asked for; the rest is -inf.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1 if top is None else top)
    output = llm.generate({"prompt_token_ids": list(token_ids)}, params, use_tqdm=False)[0]
    rows = output.prompt_logprobs[1:]
    vocab = llm.llm_engine.model_config.get_vocab_size()
    table = torch.full((len(rows), vocab), -math.inf)
    for row, entries in enumerate(rows):
        ids = torch.tensor(list(entries))
        table[row, ids] = torch.tensor([entry.logprob for entry in entries.values()])
    return table


def nll(llm, token_ids) -> float:
    """Mean negative log-likelihood (nats) of token_ids[1:]."""
    table = prompt_logprobs(llm, token_ids, top=1)
    targets = torch.tensor(token_ids[1:])
    return -table.gather(1, targets[:, None]).mean().item()


def greedy(llm, prompts, max_tokens=16) -> list[list[int]]:
    """Greedy continuations of prompts (lists of token ids)."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
