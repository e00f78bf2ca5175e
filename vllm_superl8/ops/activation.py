# SPDX-License-Identifier: BSD-3-Clause
"""Activations of feed-forward layers, gated and plain, computed in float32."""

import torch
import torch.nn.functional as F

from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream


def _situ(gate, up, beta, linear_beta):
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def _silu_clamp(gate, up, limit, alpha, bias):
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + bias)


GATED = {
    "silu": lambda gate, up, a, b, c: F.silu(gate) * up,
    "gelu": lambda gate, up, a, b, c: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, a, b, c: F.gelu(gate, approximate="tanh") * up,
    "mul_and_silu": lambda gate, up, a, b, c: gate * F.silu(up),
    "fatrelu": lambda gate, up, a, b, c: F.threshold(gate, a, 0.0) * up,
    "situ": lambda gate, up, a, b, c: _situ(gate, up, a, b),
    "silu_clamp": lambda gate, up, a, b, c: _silu_clamp(gate, up, a, b, c),
    "swigluoai": lambda gate, up, a, b, c: _silu_clamp(gate, up, b, a, 1.0),
    "swiglustep": lambda gate, up, a, b, c: F.silu(gate).clamp(max=a) * up.clamp(-a, a),
}
"""activation -> f(gate, up, a, b, c). a, b and c: fatrelu threshold; situ beta, linear beta (<= 0: none); silu_clamp
limit, alpha, bias; swigluoai alpha, limit; swiglustep limit."""

PLAIN = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "silu_no_mul": F.silu,
}


def _check(table, out, x, activation, width):
    if activation not in table:
        raise ValueError(f"activation: there is none called {activation!r}; known are {', '.join(table)}")
    if out.shape != (*x.shape[:-1], width) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"{activation}: out is {tuple(out.shape)} {out.dtype} for x of {tuple(x.shape)} {x.dtype}")


def act_and_mul_reference(out, x, activation, a=0.0, b=0.0, c=0.0):
    _check(GATED, out, x, activation, x.shape[-1] // 2)
    v = x.float()
    gate, up = (v[..., ::2], v[..., 1::2]) if activation == "swigluoai" else v.chunk(2, -1)
    out.copy_(GATED[activation](gate, up, a, b, c))


def act_and_mul_kernel(module, out, x, activation, a=0.0, b=0.0, c=0.0):
    _check(GATED, out, x, activation, x.shape[-1] // 2)
    _launch(module, out, x, activation, a, b, c)


def act_reference(out, x, activation):
    _check(PLAIN, out, x, activation, x.shape[-1])
    out.copy_(PLAIN[activation](x.float()))


def act_kernel(module, out, x, activation):
    _check(PLAIN, out, x, activation, x.shape[-1])
    _launch(module, out, x, activation, 0.0, 0.0, 0.0)


def _launch(module, out, x, activation, a, b, c):
    rows, n = rows_of(x), out.shape[-1]
    module.activation(
        activation, dtype_name(x, activation), ptr(out), ptr(rows), rows.shape[0], n, rows.stride(0), a, b, c,
        stream(x),
    )  # fmt: skip


def _nothing(*_, **__):
    return None


act_and_mul = register(
    "act_and_mul",
    "(Tensor(a!) out, Tensor x, str activation, float a=0.0, float b=0.0, float c=0.0) -> ()",
    reference=act_and_mul_reference,
    fake=_nothing,
    kernel=act_and_mul_kernel,
)
"""out = activation(gate) * up, or the gated function that GATED names, of x's two halves.

out         (..., n) contiguous, dtype of x
x           (..., 2 n) float16, bfloat16 or float32: gate then up; "swigluoai" has them interleaved
activation  a key of GATED, which also says what a, b and c are
"""

act = register(
    "act",
    "(Tensor(a!) out, Tensor x, str activation) -> ()",
    reference=act_reference,
    fake=_nothing,
    kernel=act_kernel,
)
"""out = activation(x), both (..., n); activation is a key of PLAIN."""
