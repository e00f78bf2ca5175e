# SPDX-License-Identifier: BSD-3-Clause
"""Runs the reference and the quantised models over the same text, one engine after the other in this process."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from vllm_superl8.formats import kv as kv_codec
from vllm_superl8.formats.layout import KV_LAYOUTS
from vllm_superl8.tools.diagnosis.capture import Capture, capturing, modules
from vllm_superl8.tools.diagnosis.metrics import Distance, distance, sqnr_db

ROWS = 64
"""Tokens whose logits are compared at a time."""

KV_PAGE = 16


@dataclass(frozen=True)
class Format:
    """What a run quantises; act is token, group128, auto (as the checkpoint has it) or none (16-bit weights)."""

    kv: str
    act: str

    @property
    def name(self) -> str:
        return f"kv={self.kv} act={self.act}"

    @property
    def options(self) -> dict:
        """Options of the quantisation method."""
        return {"ignore": ["*"]} if self.act == "none" else {"activation": self.act}


@dataclass
class Result:
    """A format against the reference; SQNR in dB by module.

    contexts      number of tokens to the distance of the next-token distributions
    gemm          a linear layer, given the reference's input
    k, v          what an attention layer reads back from the KV cache; empty for a cache that stores them as they are
    attention     an attention layer, in a decoder layer that is given the reference's input
    layer         what a decoder layer adds to its input, given the reference's input
    accumulated   a decoder layer's output, with all that went wrong before it
    """

    format: Format
    contexts: dict[int, Distance] = field(default_factory=dict)
    gemm: dict[str, float] = field(default_factory=dict)
    k: dict[str, float] = field(default_factory=dict)
    v: dict[str, float] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)
    layer: dict[str, float] = field(default_factory=dict)
    accumulated: dict[str, float] = field(default_factory=dict)


LEVELS = {
    "gemm": "linear layers, each with the reference's input",
    "k": "keys as read from the KV cache",
    "v": "values as read from the KV cache",
    "attention": "attention, in a layer with the reference's input",
    "layer": "what a layer adds, with the reference's input",
    "accumulated": "the hidden states after a layer",
}
"""Fields of Result by module to what they say."""


@dataclass(frozen=True)
class Plan:
    """What to compare.

    model, reference   as for vLLM
    formats            what to run the model with
    contexts           numbers of tokens, each from the beginning of the text; modules are compared at the largest
    positions          tokens that modules are compared at, spread over the text
    dtype              of both models, as for vLLM
    """

    model: str
    reference: str
    formats: tuple[Format, ...]
    text: str
    contexts: tuple[int, ...]
    positions: int = 64
    dtype: str = "auto"
    tokenizer: str | None = None
    kv_bytes: int = 1 << 30


def diagnose(plan: Plan, say=lambda text: None) -> list[Result]:
    """The results of all formats. Raises ValueError for a text that is too short, and what vLLM raises."""
    longest = max(plan.contexts)
    with tempfile.TemporaryDirectory(prefix="superl8-diagnose-") as folder:
        say(f"reference: {plan.reference} in 16 bit")
        with engine(plan, plan.reference, Format("auto", "none")) as llm:
            ids = llm.get_tokenizer().encode(plan.text)
            if len(ids) < longest:
                raise ValueError(f"the text has {len(ids)} tokens and the longest context {longest}; give a longer one")
            positions = torch.linspace(1, longest - 1, min(plan.positions, longest - 1)).long()
            logits, reference = {}, None
            for context in plan.contexts:
                capture = run(llm, ids[:context], positions, inside=context == longest)
                logits[context] = _keep(llm, capture.hidden, Path(folder) / f"{context}.logits")
                if context == longest:
                    reference = capture
        results = []
        for form in plan.formats:
            say(f"{form.name}: {plan.model}")
            with engine(plan, plan.model, form) as llm:
                results.append(_compare(llm, form, plan, ids, positions, logits, reference))
        return results


def _compare(llm, form: Format, plan: Plan, ids, positions, logits, reference: Capture) -> Result:
    result, longest = Result(form), max(plan.contexts)
    model = model_of(llm)
    for context in plan.contexts:
        capture = run(llm, ids[:context], positions, inside=context == longest)
        pairs = (
            (
                _logits(model, capture.hidden[start : start + ROWS]),
                torch.from_numpy(logits[context][start : start + ROWS]),
            )
            for start in range(0, context, ROWS)
        )
        result.contexts[context] = distance(pairs, torch.tensor(ids[1:context]))
        if context == longest:
            result.accumulated = _ratios(capture.layer_sum, reference.layer_sum)
    given = run(llm, ids[:longest], positions, inside=True, replace=reference.layer_in)
    result.layer = _ratios(given.layer_step, reference.layer_step)
    result.attention = _ratios(given.attention, reference.attention)
    linear, attention, _ = modules(model)
    for name, module in linear.items():
        if name in reference.gemm_in:
            weight = next(module.parameters())
            with torch.inference_mode():
                out = module(reference.gemm_in[name].to(weight.device, llm.llm_engine.model_config.dtype))
            out = out[0] if isinstance(out, tuple) else out
            result.gemm[name] = sqnr_db(out.float().cpu(), reference.gemm_out[name])
    for name, (k, v) in reference.kv.items():
        if name in attention and form.kv in KV_LAYOUTS:
            stored = read_back(k, v, form.kv, attention[name].num_kv_heads, attention[name].head_size)
            result.k[name], result.v[name] = sqnr_db(stored[0], k), sqnr_db(stored[1], v)
    return result


def _ratios(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: sqnr_db(got[name], value) for name, value in want.items() if name in got}


def read_back(k: torch.Tensor, v: torch.Tensor, kv_format: str, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """K and V (tokens, heads * head_dim) as they come back from a cache of this format, in float32."""
    layout, tokens = KV_LAYOUTS[kv_format], len(k)
    pages = -(-tokens // KV_PAGE)
    dtype = kv_codec.STORAGE[layout.name]
    content = layout.token_bytes(head_dim) // dtype.itemsize
    cache = torch.zeros(pages, heads, KV_PAGE, content, dtype=dtype)
    split = [x.unflatten(1, (heads, head_dim)) for x in (k, v)]
    kv_codec.encode(cache, layout, *split, torch.arange(tokens))
    read = kv_codec.decode(cache, layout, torch.arange(pages), head_dim)
    return tuple(x[:, :tokens].transpose(0, 1).flatten(1) for x in read)


def run(llm, ids: list[int], positions: torch.Tensor, inside: bool, replace=None) -> Capture:
    """One forward pass over all tokens."""
    from vllm import SamplingParams

    with capturing(model_of(llm), len(ids), positions, inside, replace) as capture:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    if capture.hidden is None:
        raise ValueError(f"no pass over all {len(ids)} tokens was seen; this model cannot be diagnosed")
    return capture


def model_of(llm):
    """The torch module that an engine in this process runs."""
    return llm.apply_model(lambda model: model)[0]


def _logits(model, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.compute_logits(hidden).float().cpu()


def _keep(llm, hidden: torch.Tensor, path: Path) -> np.ndarray:
    """Logits of all tokens, in a file: a large vocabulary does not fit in memory twice."""
    model, kept = model_of(llm), None
    for start in range(0, len(hidden), ROWS):
        part = _logits(model, hidden[start : start + ROWS])
        if kept is None:
            kept = np.memmap(path, np.float32, "w+", shape=(len(hidden), part.shape[1]))
        kept[start : start + ROWS] = part.numpy()
    return kept


@contextlib.contextmanager
def engine(plan: Plan, model: str, form: Format) -> Iterator:
    """vLLM on a model, in this process and without compilation, so that hooks are called."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    length = max(plan.contexts) + 1
    llm = LLM(
        model=model,
        tokenizer=plan.tokenizer,
        quantization="superl8",
        dtype=plan.dtype,
        kv_cache_dtype=form.kv,
        max_model_len=length,
        max_num_batched_tokens=max(length, 2048),
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=plan.kv_bytes,
        seed=0,
        additional_config={"superl8": form.options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
