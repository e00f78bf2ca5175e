# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the namespace _C."""

import torch

from vllm_superl8 import ops
from vllm_superl8.platform import driver
from vllm_superl8.platform.stand_ins import library

_GATED = {
    # name: (parameters after out and x, in our order of a, b, c, with their defaults or None; our activation)
    "silu_and_mul": ({}, "silu"),
    "gelu_and_mul": ({}, "gelu"),
    "gelu_tanh_and_mul": ({}, "gelu_tanh"),
    "mul_and_silu": ({}, "mul_and_silu"),
    "fatrelu_and_mul": ({"threshold": None}, "fatrelu"),
    "situ_and_mul": ({"beta": None, "linear_beta": None}, "situ"),
    "silu_and_mul_with_clamp": ({"limit": None, "alpha": 1.0, "beta": 0.0}, "silu_clamp"),
    "swigluoai_and_mul": ({"alpha": 1.702, "limit": 7.0}, "swigluoai"),
    "swiglustep_and_mul": ({"limit": 7.0}, "swiglustep"),
}

_PLAIN = {
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "gelu_quick": "gelu_quick",
    "relu_squared": "relu2",
    "relu2_no_mul": "relu2",
}

_PROBES = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


def define(device: str) -> None:
    """Define what vLLM calls on "cpu" or "cuda"."""
    for name, (parameters, activation) in _GATED.items():
        listed = "".join(f", float {key}" + ("" if v is None else f"={v}") for key, v in parameters.items())
        library.define(
            "_C", f"{name}(Tensor(a!) out, Tensor x{listed}) -> ()", _gated(activation, tuple(parameters.values()))
        )
    for name, activation in _PLAIN.items():
        library.define("_C", f"{name}(Tensor(a!) out, Tensor x) -> ()", _plain(activation))
    library.define(
        "_C",
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        ops.rotary_embedding,
    )
    library.define("_C", "rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()", _rms_norm)
    library.define(
        "_C",
        "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
        _fused_add_rms_norm,
    )
    library.define(
        "_C",
        "apply_repetition_penalties_(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, Tensor penalties) "
        "-> ()",
        ops.apply_repetition_penalties,
    )
    library.define(
        "_C",
        "vocab_parallel_embedding(Tensor(a!) out, Tensor ids, Tensor weight, int org_start, int org_end, int "
        "num_org_padding, int added_start, int added_end) -> ()",
        ops.vocab_parallel_embedding,
    )
    library.define(
        "_C",
        "merge_attn_states(Tensor(a!) out, Tensor(b!)? out_lse, Tensor prefix, Tensor prefix_lse, Tensor suffix, "
        "Tensor suffix_lse, int? prefill_tokens_with_context=None, Tensor? output_scale=None) -> ()",
        _merge_attn_states,
    )
    for name in _PROBES:
        library.define("_C", f"{name}(int capability) -> bool", lambda capability: False)
    if device == "cpu":
        library.define("_C", "init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
        library.define("_C", "greedy_argmax(Tensor logits) -> Tensor", ops.greedy_argmax, _row_ids)
        library.define("_C", "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", ops.gumbel_argmax, _row_ids)
    else:
        library.define("_C", "weak_ref_tensor(Tensor x) -> Tensor", _weak_ref_tensor, torch.empty_like)
        library.define("_C", "get_cuda_view_from_cpu_tensor(Tensor x) -> Tensor", _cuda_view, _cuda_like)


def _gated(activation, defaults):
    # torch leaves out trailing arguments that equal the schema's defaults.
    return lambda out, x, *given: ops.act_and_mul(out, x, activation, *given, *defaults[len(given) :])


def _plain(activation):
    return lambda out, x: ops.act(out, x, activation)


def _rms_norm(out, x, weight, epsilon):
    out.copy_(ops.rms_norm(x, weight, epsilon))


def _fused_add_rms_norm(x, residual, weight, epsilon):
    x.copy_(ops.fused_add_rms_norm(x, residual, weight, epsilon))


def _merge_attn_states(
    out, out_lse, prefix, prefix_lse, suffix, suffix_lse, prefill_tokens_with_context=None, output_scale=None
):
    if output_scale is not None:
        raise ValueError("merge_attn_states: a quantised output is not served")
    ops.merge_attn_states(out, out_lse, prefix, prefix_lse, suffix, suffix_lse, prefill_tokens_with_context)


def _row_ids(logits, *_):
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


def _alias(x, address, device):
    """A tensor like x whose memory starts where x's storage does, at another address or on another device."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, x.untyped_storage().nbytes())
    return torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.shape, x.stride())


def _keeping_alias(x, address, device):
    """An alias that x outlives, however the alias is passed on: its storage holds x."""
    alias = _alias(x, address, device)
    alias.untyped_storage().source = x
    return alias


def _weak_ref_tensor(x):
    """A tensor on x's memory that does not keep it alive, for CUDA graph outputs."""
    return _alias(x, x.untyped_storage().data_ptr(), x.device)


def _cuda_view(x):
    """A CUDA tensor on the memory of a CPU tensor, which it keeps alive; the GPU reads it over PCIe.

    If x is not pinned, the view is of a pinned copy and later changes of x do not show.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    if not x.is_pinned():
        x = x.pin_memory()
    return _keeping_alias(x, driver.device_address(x.untyped_storage().data_ptr()), device)


def _cuda_like(x):
    return torch.empty_like(x, device="cuda")
