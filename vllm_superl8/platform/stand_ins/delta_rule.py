# SPDX-License-Identifier: BSD-3-Clause
"""Operators of _C for gated delta networks (Qwen3-Next, Qwen3.5) on a CPU, in plain torch and float32.

A head keeps a state S (K, V). With key k, query q (both normalised, q scaled by 1/sqrt(K)), value v, decay exp(g) and
step beta, a token does (arXiv:2412.06464)
    S = exp(g) S;  S = S + k (beta (v - k S));  out = q S
Query and key heads are shared by groups of value heads.
"""

import itertools

import torch
import torch.nn.functional as F

from vllm_superl8.platform.stand_ins import library

CHUNK_TOKENS = 64
DECODE_EPS = 1e-6  # of the normalisation; vLLM's decode kernels fix it


def define(device: str) -> None:
    """Define what vLLM calls on "cpu"; on "cuda" it runs Triton kernels for these layers."""
    if device != "cpu":
        return
    library.define(
        "_C",
        "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        _gating,
        lambda A_log, a, b, dt_bias: tuple(a.new_empty((1, *a.shape), dtype=torch.float32) for _ in range(2)),
    )
    library.define(
        "_C",
        "chunk_gated_delta_rule_cpu(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) "
        "initial_state, bool output_final_state, Tensor cu_seqlens, bool head_first, bool use_qk_l2norm_in_kernel, "
        "Tensor initial_state_indices, float eps=1e-5) -> (Tensor, Tensor)",
        _chunk_rule,
        lambda query, key, value, g, beta, state, *_: (torch.empty_like(value), state.new_empty(0)),
    )
    shared = "Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor(a!) state"
    library.define(
        "_C",
        f"fused_sigmoid_gating_delta_rule_update_cpu({shared}, Tensor state_indices, Tensor cu_seqlens, bool "
        "use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor",
        _update,
        lambda A_log, dt_bias, q, k, v, *_: v.new_empty((v.shape[-3], 1, *v.shape[-2:])),
    )
    library.define(
        "_C",
        f"fused_sigmoid_gating_delta_rule_update_spec_cpu({shared}, Tensor state_indices, Tensor num_accepted_tokens, "
        "Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) "
        "-> Tensor",
        _update_drafts,
        lambda A_log, dt_bias, q, k, v, *_: v.new_empty(v.shape),
    )


def _gating(A_log, a, b, dt_bias, softplus_beta=1.0, softplus_threshold=20.0):
    """g and beta (1, tokens, heads) float32 of a and b (tokens, heads)."""
    rate = F.softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
    return (-A_log.float().exp() * rate).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def _prepared(q, k, value_heads, normalise, eps):
    """q and k (tokens, heads, K) for every value head, in float32."""
    q, k = q.float(), k.float()
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    repeat = value_heads // q.shape[-2]
    return q.repeat_interleave(repeat, -2) * q.shape[-1] ** -0.5, k.repeat_interleave(repeat, -2)


def _step(state, q, k, v, g, beta):
    """One token of each request: state (requests, heads, K, V) moves on; returns (requests, heads, V)."""
    state.mul_(g.exp()[..., None, None])
    error = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * beta.unsqueeze(-1)
    state.add_(k.unsqueeze(-1) * error.unsqueeze(-2))
    return torch.einsum("rhkv,rhk->rhv", state, q)


def _chunk(state, q, k, v, g, beta):
    """A run of tokens of one request: the same recurrence in matrix form (the paper's section 3.3).

    q, k, v (heads, tokens, .); g, beta (heads, tokens); state (heads, K, V) moves on; returns (heads, tokens, V).
    """
    falls = g.cumsum(-1)  # log of the decay from the start of the run
    within = torch.exp((falls.unsqueeze(-1) - falls.unsqueeze(-2)).tril()).tril()  # decay from token j to i
    # what each token writes depends on what those before it wrote: a unit lower triangular system
    system = (k @ k.transpose(1, 2) * within * beta.unsqueeze(-1)).tril(-1)
    wanted = beta.unsqueeze(-1) * (v - falls.exp().unsqueeze(-1) * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = falls.exp().unsqueeze(-1) * (q @ state) + (q @ k.transpose(1, 2) * within) @ written
    remaining = torch.exp(falls[:, -1:] - falls).unsqueeze(-1)
    state.mul_(falls[:, -1].exp().view(-1, 1, 1)).add_((k * remaining).transpose(1, 2) @ written)
    return out


def _chunk_rule(
    query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices, eps=1e-5,
):  # fmt: skip
    """Whole prompts: query, key, value (1, tokens, heads, .); states (slots, heads, K, V) are read and replaced."""
    if head_first:
        raise ValueError("chunk_gated_delta_rule_cpu: head_first is not served")
    q, k = _prepared(query[0], key[0], value.shape[-2], use_qk_l2norm_in_kernel, eps)
    out, heads = torch.empty_like(value), (q.transpose(0, 1), k.transpose(0, 1), value[0].float().transpose(0, 1))
    gates = (g[0].float().T, beta[0].float().T)
    for slot, (start, end) in zip(initial_state_indices.tolist(), itertools.pairwise(cu_seqlens.tolist()), strict=True):
        state = initial_state[slot].float()
        for first in range(start, end, CHUNK_TOKENS):
            part = slice(first, min(end, first + CHUNK_TOKENS))
            got = _chunk(state, *(x[:, part] for x in (*heads, *gates)))
            out[0, part] = got.transpose(0, 1).to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    # the final states are in their slots already
    return out, initial_state.new_empty(0)


def _walk(A_log, dt_bias, q, k, v, a, b, cu_seqlens, normalise, softplus, state, after_step):
    """Run requests token by token; state (requests, heads, K, V). Calls after_step(step, active requests)."""
    q, k = _prepared(q, k, v.shape[-2], normalise, DECODE_EPS)
    g, beta = (x[0] for x in _gating(A_log, a, b, dt_bias, *softplus))
    starts = cu_seqlens.long()
    lengths, out = starts[1:] - starts[:-1], torch.zeros_like(v)
    for step in range(int(lengths.max()) if lengths.numel() else 0):
        active = (lengths > step).nonzero().flatten()
        at, moved = starts[active] + step, state[active]
        out[at] = _step(moved, q[at], k[at], v[at].float(), g[at], beta[at]).to(out.dtype)
        state[active] = moved
        after_step(step, active)
    return out


def _update(
    A_log, dt_bias, q, k, v, a, b, state, state_indices, cu_seqlens, use_qk_l2norm_in_kernel, softplus_beta=1.0,
    softplus_threshold=20.0,
):  # fmt: skip
    """Decoding: q, k, v (1, tokens, heads, .); state (slots, heads, K, V). Returns (tokens, 1, heads, V)."""
    slots, softplus = state_indices.long(), (softplus_beta, softplus_threshold)
    now = state[slots].float()
    out = _walk(
        A_log, dt_bias, q[0], k[0], v[0], a, b, cu_seqlens, use_qk_l2norm_in_kernel, softplus, now, lambda *_: None
    )  # fmt: skip
    state[slots] = now.to(state.dtype)
    return out.unsqueeze(1)


def _update_drafts(
    A_log, dt_bias, q, k, v, a, b, state, state_indices, num_accepted_tokens, cu_seqlens, use_qk_l2norm_in_kernel,
    softplus_beta=1.0, softplus_threshold=20.0,
):  # fmt: skip
    """Verifying drafts: q, k, v (tokens, heads, .); state_indices (requests, drafts).

    A request goes on from the slot of its last accepted token, and the state after draft t goes to its slot t.
    """
    slots, softplus = state_indices.long(), (softplus_beta, softplus_threshold)
    last = (num_accepted_tokens.long() - 1).clamp_min(0)
    now = state[slots.gather(1, last.unsqueeze(1)).squeeze(1)].float()

    def keep(step, active):
        state[slots[active, step]] = now[active].to(state.dtype)

    return _walk(A_log, dt_bias, q, k, v, a, b, cu_seqlens, use_qk_l2norm_in_kernel, softplus, now, keep)
