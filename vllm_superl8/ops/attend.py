# SPDX-License-Identifier: BSD-3-Clause
"""The definition of attention, for one sequence; the references of paged_attention and dense_attention call it."""

import torch
import torch.nn.functional as F


def attend(
    query, k, v, first_position, softmax_scale, causal, sliding_window=0, logit_softcap=0.0, sinks=None,
    alibi_slopes=None, symmetric_window=False, ancestors=None,
):  # fmt: skip
    """softmax(mask(softcap(query k^T * softmax_scale) + alibi)) v.

    query           (num_heads, q_len, head_dim) dtype of k
    k, v            (num_kv_heads, keys, head_dim) float32 or float64
    first_position  of the first query token among the keys
    the rest        as ops.paged_attention; sinks and alibi_slopes of any floating dtype
    returns         (num_heads, q_len, head_dim), dtype of k; zeros for a query token that sees no key

    Without softcap and sinks one call of torch's scaled_dot_product_attention does the same, two to three times as
    fast on two cores (the CPU server runs on it).
    """
    num_heads, q_len, head_dim = query.shape
    num_kv_heads, keys, _ = k.shape
    if ancestors is None:
        hidden = _hidden(first_position, q_len, keys, causal, sliding_window, symmetric_window, k.device)
    else:
        hidden = _outside_tree(first_position, ancestors, keys)
    distance = None
    if alibi_slopes is not None:
        distance = _positions(first_position, q_len, k.device)[:, None] - torch.arange(keys, device=k.device)
        slopes = alibi_slopes.to(k.dtype)[:, None, None]
    if not logit_softcap and sinks is None and first_position >= 0:  # then every query token sees a key
        mask = None if hidden is None else ~hidden
        if alibi_slopes is not None:
            mask = -slopes * distance
            mask = mask if hidden is None else mask.masked_fill(hidden, -torch.inf)
        if q_len == 1:  # heads of a group as query tokens: K and V are read once for all of them
            grouped = query.view(1, num_kv_heads, -1, head_dim)
            mask = mask if mask is None or mask.dim() == 2 else mask.view(1, num_kv_heads, -1, keys)
            seen = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=mask, scale=softmax_scale)
            return seen.reshape(num_heads, 1, head_dim)
        seen = F.scaled_dot_product_attention(
            query[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=num_heads != num_kv_heads
        )
        return seen[0]

    scores = query.reshape(num_kv_heads, -1, head_dim) @ k.transpose(1, 2)
    scores = scores.view(num_heads, q_len, keys) * softmax_scale
    if logit_softcap:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    if alibi_slopes is not None:
        scores = scores - slopes * distance
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, q_len, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a row that sees no key is NaN here
    return (weights.view(num_kv_heads, -1, keys) @ v).view(num_heads, q_len, head_dim)


def _positions(first_position: int, q_len: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first_position, first_position + q_len, device=device)


def _hidden(first_position, q_len, keys, causal, sliding_window, symmetric_window, device) -> torch.Tensor | None:
    """(q_len, keys) bool, True where a query token does not see a key; None if it sees all of them."""
    last_position = first_position + q_len - 1
    ahead = 0 if causal else sliding_window - 1 if symmetric_window and sliding_window else 1 << 30
    future = first_position + ahead < keys - 1
    past = sliding_window and last_position >= sliding_window
    if not future and not past:
        return None
    distance = _positions(first_position, q_len, device)[:, None] - torch.arange(keys, device=device)
    if not past:
        return distance < -ahead
    return (distance < -ahead) | (distance >= sliding_window)


def _outside_tree(first_position, ancestors, keys) -> torch.Tensor:
    """(q_len, keys) bool, True for the query tokens whose bit is not set."""
    place = torch.arange(keys, device=ancestors.device) - first_position
    return (place >= 0) & (ancestors.long()[:, None] >> place.clamp(min=0) & 1 == 0)
