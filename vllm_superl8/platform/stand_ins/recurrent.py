# SPDX-License-Identifier: BSD-3-Clause
"""Operators of _C that hybrid models call on a CPU: causal convolutions and state-space layers, in plain torch.

States of all requests lie in slots; an index tensor says which slot is a request's. All arithmetic is in float32.
"""

import itertools

import torch
import torch.nn.functional as F

from vllm_superl8.platform.stand_ins import library

SCAN_TOKENS = 64  # tokens that a state-space layer takes at once


def define(device: str) -> None:
    """Define what vLLM calls on "cpu"; on "cuda" it runs Triton kernels for these layers."""
    if device != "cpu":
        return
    library.define(
        "_C",
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? conv_state_indices, Tensor? query_start_loc, int pad_slot_id) -> Tensor",
        _conv_update_vec,
        lambda x, *_: torch.empty_like(x),
    )
    library.define("_C", "causal_conv1d_weight_pack(Tensor weight) -> Tensor", torch.clone, torch.empty_like)
    library.define(
        "_C",
        "causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_states, Tensor? "
        "query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, bool silu_activation, int pad_slot_id, "
        "bool is_weight_packed) -> Tensor",
        _conv_forward,
        lambda x, *_: torch.empty_like(x),
    )
    library.define(
        "_C",
        "causal_conv1d_update_cpu(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu_activation, "
        "Tensor? num_accepted_tokens, Tensor? conv_state_indices, int pad_slot_id, bool is_weight_packed) -> Tensor",
        _conv_update,
        lambda x, *_: torch.empty_like(x),
    )
    library.define(
        "_C",
        "selective_state_update_cpu(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices, "
        "int null_block_id, Tensor(b!) out, Tensor? num_accepted_tokens, Tensor? cu_seqlens) -> ()",
        _selective_state_update,
    )
    library.define(
        "_C",
        "mamba_chunk_scan_fwd_cpu(Tensor(a!) out, Tensor(b!) final_states, Tensor x, Tensor dt, Tensor A, Tensor B, "
        "Tensor C, Tensor? D, Tensor? z, Tensor cu_seqlens) -> ()",
        _mamba_chunk_scan,
    )


# ---- causal convolutions


def _convolve(prior, x, weight, bias, silu):
    """Outputs (requests, channels, n) of x (requests, channels, n), and x with what was before it.

    prior (requests, channels, width - 1), weight (channels, width), bias (channels) or None.
    """
    window = torch.cat([prior.float(), x.float()], -1)
    out = F.conv1d(window, weight.float().unsqueeze(1), None if bias is None else bias.float(), groups=weight.shape[0])
    return F.silu(out) if silu else out, window


def _conv_update_vec(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, pad_slot_id):
    """Next outputs of requests; their states move on. States hold the last width - 1 inputs of each channel.

    x (requests, channels) or (requests, channels, n), or (tokens, channels) with query_start_loc (requests + 1);
    conv_state (slots, channels, >= width - 1). Requests at pad_slot_id are left alone.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d_update: there is no activation {activation!r} here; known are silu and swish")
    out = x.clone()
    if query_start_loc is not None:
        parts = [(slice(a, b), x[a:b].T.unsqueeze(0)) for a, b in itertools.pairwise(query_start_loc.tolist())]
    else:
        parts = [(slice(None), x if x.dim() == 3 else x.unsqueeze(-1))]
    requests = x.shape[0] if query_start_loc is None else len(parts)
    slots = (
        torch.arange(requests) if conv_state_indices is None else conv_state_indices[:requests].reshape(requests, -1)
    )
    slots = slots.reshape(requests, -1)[:, 0].long()
    history = weight.shape[1] - 1
    for number, (rows, part) in enumerate(parts):
        own = slots if query_start_loc is None else slots[number : number + 1]
        keep = own != pad_slot_id
        if not keep.any() or not part.shape[-1]:
            continue
        got, window = _convolve(conv_state[own[keep], :, :history], part[keep], weight, bias, activation is not None)
        conv_state[own[keep], :, :history] = window[..., window.shape[-1] - history :].to(conv_state.dtype)
        got = got.to(x.dtype)
        if query_start_loc is not None:
            out[rows] = got[0].T
        else:
            out[keep] = got if x.dim() == 3 else got.squeeze(-1)
    return out


def _conv_forward(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation, pad_slot_id,
    is_weight_packed,
):  # fmt: skip
    """Outputs (channels, tokens) of whole prompts x (channels, tokens); our packed weights are the plain ones."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    activation = "silu" if silu_activation else None
    return causal_conv1d_fn_cpu(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, pad_slot_id
    )


def _conv_update(
    x,
    conv_states,
    weight,
    bias,
    silu_activation,
    num_accepted_tokens,
    conv_state_indices,
    pad_slot_id,
    is_weight_packed,
):
    """Next outputs of requests: one token each, x (requests, channels), or drafts, x (requests, n, channels).

    With drafts the state is wider than width - 1: its history starts at the number of tokens accepted last time - 1.
    """
    if num_accepted_tokens is None:
        activation = "silu" if silu_activation else None
        return _conv_update_vec(x, conv_states, weight, bias, activation, conv_state_indices, None, pad_slot_id)
    history, out = weight.shape[1] - 1, torch.empty_like(x)
    for request, (slot, accepted) in enumerate(
        zip(conv_state_indices.tolist(), num_accepted_tokens.tolist(), strict=True)
    ):
        state = conv_states[slot]
        prior = state[:, accepted - 1 : accepted - 1 + history]
        got, window = _convolve(prior.unsqueeze(0), x[request].T.unsqueeze(0), weight, bias, silu_activation)
        out[request] = got[0].T.to(x.dtype)
        state[:, : window.shape[-1] - 1] = window[0, :, 1:].to(state.dtype)
    return out


# ---- Mamba 2


def _spread(x, heads):
    """x (..., groups, n) with each group repeated for its share of the heads, in float32."""
    return x.float().repeat_interleave(heads // x.shape[-2], -2)


def _selective_state_update(
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dst_state_batch_indices, null_block_id, out,
    num_accepted_tokens, cu_seqlens,
):  # fmt: skip
    """One token a request, or with cu_seqlens and num_accepted_tokens drafts, whose states go to slots of their own.

    state (slots, heads, D, N); x, dt, z, out (tokens, heads, D); A (heads, D, N); B, C (tokens, groups, N); D, dt_bias
    (heads, D); indices (requests) or (requests, drafts).
    """
    tokens, heads = x.shape[:2]
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = F.softplus(dt) if dt_softplus else dt
    x_float, B, C = x.float(), _spread(B, heads), _spread(C, heads)
    starts = torch.arange(tokens + 1) if cu_seqlens is None else cu_seqlens.long()
    requests = starts.numel() - 1
    sources = torch.arange(requests) if state_batch_indices is None else state_batch_indices.long()
    sources = sources.reshape(requests, -1)
    targets = sources if dst_state_batch_indices is None else dst_state_batch_indices.long().reshape(requests, -1)
    first = torch.zeros(requests, dtype=torch.long)
    if num_accepted_tokens is not None:
        first = (num_accepted_tokens.long() - 1).clamp_min(0)
    own = sources.gather(1, first.unsqueeze(1)).squeeze(1)
    known = torch.ones_like(own, dtype=torch.bool) if state_batch_indices is None else own != null_block_id
    now = torch.where(known.view(-1, 1, 1, 1), state[own.clamp_min(0)].float(), 0.0)
    lengths = starts[1:] - starts[:-1]
    for step in range(int(lengths.max()) if requests else 0):
        active = lengths > step
        at = starts[:-1][active] + step
        decay = torch.exp(A.float() * dt[at].unsqueeze(-1))
        moved = now[active] * decay + (dt[at] * x_float[at]).unsqueeze(-1) * B[at].unsqueeze(-2)
        now[active] = moved
        y = (moved * C[at].unsqueeze(-2)).sum(-1)
        if D is not None:
            y += x_float[at] * D.float()
        if z is not None:
            y *= F.silu(z[at].float())
        out[at] = y.to(out.dtype)
        if num_accepted_tokens is not None:
            _store(state, targets[active, step], moved, null_block_id)
    if num_accepted_tokens is None:
        _store(state, torch.where(known, targets[:, 0], null_block_id), now, null_block_id, state_batch_indices is None)


def _store(state, slots, values, null_block_id, all_slots=False):
    keep = torch.ones_like(slots, dtype=torch.bool) if all_slots else slots != null_block_id
    state[slots[keep]] = values[keep].to(state.dtype)


def _mamba_chunk_scan(out, final_states, x, dt, A, B, C, D, z, cu_seqlens):
    """Whole prompts, SCAN_TOKENS at a time (the matrix form of Mamba 2, arXiv:2405.21060, section 6).

    final_states (requests, heads, D, N) float32 holds the states to start from; x, z, out (tokens, heads, D); dt
    (tokens, heads); A, D (heads); B, C (tokens, groups, N).
    """
    heads = x.shape[1]
    for request, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = final_states[request]
        for first in range(start, end, SCAN_TOKENS):
            part = slice(first, min(end, first + SCAN_TOKENS))
            b, c = (
                _spread(B[part], heads).transpose(0, 1),
                _spread(C[part], heads).transpose(0, 1),
            )  # (heads, tokens, N)
            v, step = x[part].float().transpose(0, 1), dt[part].float().T  # (heads, tokens, D), (heads, tokens)
            falls = (A.float().unsqueeze(-1) * step).cumsum(-1)  # log of the decay from the start of the part
            within = torch.exp((falls.unsqueeze(-1) - falls.unsqueeze(-2)).tril()).tril()  # decay from token j to i
            y = ((c @ b.transpose(1, 2)) * within * step.unsqueeze(1)) @ v
            y += torch.exp(falls).unsqueeze(-1) * (c @ state.transpose(1, 2))
            remaining = torch.exp(falls[:, -1:] - falls) * step
            state.mul_(torch.exp(falls[:, -1]).view(-1, 1, 1)).add_((v * remaining.unsqueeze(-1)).transpose(1, 2) @ b)
            y = y.transpose(0, 1)
            if D is not None:
                y = y + x[part].float() * D.float().unsqueeze(-1)
            if z is not None:
                y = y * F.silu(z[part].float())
            out[part] = y.to(out.dtype)
