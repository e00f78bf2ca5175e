# SPDX-License-Identifier: BSD-3-Clause
"""Joining two attentions over different keys of the same queries (arXiv:2501.01005, section 2.2)."""

import torch

from vllm_superl8.ops.registry import dtype_name, ptr, register, stream


def _check(out, out_lse, prefix, prefix_lse, suffix, suffix_lse):
    for name, tensor in (("prefix", prefix), ("suffix", suffix)):
        if tensor.shape != out.shape or tensor.dtype != out.dtype:
            raise ValueError(
                f"merge_attn_states: {name} is {tuple(tensor.shape)} {tensor.dtype}, out {tuple(out.shape)} {out.dtype}"
            )
    for name, lse in (("out_lse", out_lse), ("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        if lse is not None and (lse.shape != (out.shape[1], out.shape[0]) or lse.dtype != torch.float32):
            raise ValueError(
                f"merge_attn_states: {name} is {tuple(lse.shape)} {lse.dtype}, wanted ({out.shape[1]}, {out.shape[0]}) "
                "float32"
            )


def merge_attn_states_reference(out, out_lse, prefix, prefix_lse, suffix, suffix_lse, with_prefix=None):
    _check(out, out_lse, prefix, prefix_lse, suffix, suffix_lse)
    a, b = (torch.where(torch.isposinf(lse), -torch.inf, lse) for lse in (prefix_lse, suffix_lse))
    tokens = torch.arange(out.shape[0], device=out.device)
    joined = tokens < (out.shape[0] if with_prefix is None else with_prefix)
    total = torch.logaddexp(torch.where(joined, a, -torch.inf), b)
    safe = torch.where(torch.isneginf(total), 0.0, total)
    weight_a, weight_b = (torch.exp(lse - safe).T.unsqueeze(-1) for lse in (a, b))
    merged = torch.where(weight_a > 0, prefix.float() * weight_a, 0) + torch.where(
        weight_b > 0, suffix.float() * weight_b, 0
    )
    out.copy_(torch.where(joined.view(-1, 1, 1), merged.to(out.dtype), suffix))
    if out_lse is not None:
        out_lse.copy_(total)


def merge_attn_states_kernel(module, out, out_lse, prefix, prefix_lse, suffix, suffix_lse, with_prefix=None):
    _check(out, out_lse, prefix, prefix_lse, suffix, suffix_lse)
    tensors = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (prefix, suffix)]
    if out.stride(-1) != 1:
        raise ValueError(f"merge_attn_states: out has strides {out.stride()}, wanted contiguous heads")
    strides = [stride for tensor in (out, *tensors) for stride in tensor.stride()[:2]]
    for lse in (out_lse, prefix_lse, suffix_lse):
        strides += (0, 0) if lse is None else (lse.stride(1), lse.stride(0))
    module.merge_attn_states(
        dtype_name(out, "merge_attn_states"), ptr(out), ptr(out_lse), ptr(tensors[0]), ptr(prefix_lse), ptr(tensors[1]),
        ptr(suffix_lse), strides, *out.shape, out.shape[0] if with_prefix is None else with_prefix, stream(out),
    )  # fmt: skip


merge_attn_states = register(
    "merge_attn_states",
    "(Tensor(a!) out, Tensor(b!)? out_lse, Tensor prefix, Tensor prefix_lse, Tensor suffix, Tensor suffix_lse, "
    "int? with_prefix=None) -> ()",
    reference=merge_attn_states_reference,
    fake=lambda *_, **__: None,
    kernel=merge_attn_states_kernel,
)
"""out = attention over prefix and suffix keys, from the attention over each and its natural log-sum-exp.

out, prefix, suffix                (tokens, heads, head_dim) float16, bfloat16 or float32, one dtype; may be strided
out_lse, prefix_lse, suffix_lse    (heads, tokens) float32; +inf and -inf both say that nothing was attended
with_prefix                        tokens from here on have no prefix: their suffix is copied. None: all have one

Raises ValueError for shapes or dtypes that do not fit.
"""
