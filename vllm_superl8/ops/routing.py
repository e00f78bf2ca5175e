# SPDX-License-Identifier: BSD-3-Clause
"""Which experts take a token, and with what weights."""

import torch
import torch.nn.functional as F

from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream

SCORINGS = {
    "none": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""scoring -> f(float32 logits)."""

IMAGE_SENTINELS = 5
"""Consecutive token ids that stand for images in DeepSeek-V4."""


def _check(weights, ids, logits, scoring, tokens_in, hash_table, image_bias):
    if scoring not in SCORINGS:
        raise ValueError(f"topk_routing: there is no scoring called {scoring!r}; known are {', '.join(SCORINGS)}")
    for name, tensor, dtypes in (("weights", weights, (torch.float32,)), ("ids", ids, (torch.int32, torch.int64))):
        if tensor.dtype not in dtypes or tensor.shape[0] != logits.shape[0] or not tensor.is_contiguous():
            raise ValueError(
                f"topk_routing: {name} are {tuple(tensor.shape)} {tensor.dtype}, wanted contiguous "
                f"({logits.shape[0]}, topk) {' or '.join(map(str, dtypes))}"
            )
    if tokens_in is None and (hash_table is not None or image_bias is not None):
        raise ValueError("topk_routing: a hash table or an image bias needs the token ids")


def _best(ranked, count):
    """The count best of each row, best first, the lower index of equals; NaN ranks as -inf."""
    ranked = torch.where(ranked.isnan(), -torch.inf, ranked)
    return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(ranked, groups, topk_group, has_bias):
    """ranked (tokens, experts) with -inf in all groups but the topk_group best."""
    grouped = torch.where(ranked.isnan(), -torch.inf, ranked).unflatten(-1, (groups, -1))
    deciding = 2 if has_bias and grouped.shape[-1] > 1 else 1
    chosen = _best(grouped.topk(deciding, dim=-1).values.sum(-1), topk_group)
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


def topk_routing_reference(
    weights, ids, token_expert, logits, scoring, renormalize, scale=1.0, bias=None, is_padding=None, groups=1,
    topk_group=1, tokens_in=None, hash_table=None, image_bias=None, image_sentinel=0,
):  # fmt: skip
    _check(weights, ids, logits, scoring, tokens_in, hash_table, image_bias)
    tokens, topk = ids.shape
    scores = SCORINGS[scoring](logits.float())
    is_image = torch.zeros(tokens, 1, dtype=torch.bool, device=logits.device)
    if image_bias is not None and image_sentinel > 0:
        is_image = ((tokens_in >= image_sentinel) & (tokens_in < image_sentinel + IMAGE_SENTINELS)).unsqueeze(-1)
    ranked = scores if bias is None else scores + bias.float()
    if image_bias is not None:
        ranked = torch.where(is_image, scores + image_bias.float(), ranked)
    if groups > 1:
        ranked = _in_best_groups(ranked, groups, topk_group, bias is not None)
    chosen = _best(ranked, topk)
    if hash_table is not None:
        chosen = torch.where(is_image, chosen, hash_table[torch.where(is_image.squeeze(-1), 0, tokens_in)].long())
    value = scores.gather(1, chosen)
    total = value.sum(-1, keepdim=True)
    value = value * torch.where(total > 0, scale / total, scale) if renormalize else value * scale
    if is_padding is not None:
        value = value.masked_fill(is_padding.unsqueeze(-1), 0.0)
        chosen = chosen.masked_fill(is_padding.unsqueeze(-1), -1)
    weights.copy_(value)
    ids.copy_(chosen)
    if token_expert is not None:
        rows = torch.arange(tokens, device=logits.device).unsqueeze(-1)
        token_expert.copy_(rows + tokens * torch.arange(topk, device=logits.device))


def topk_routing_kernel(
    module, weights, ids, token_expert, logits, scoring, renormalize, scale=1.0, bias=None, is_padding=None, groups=1,
    topk_group=1, tokens_in=None, hash_table=None, image_bias=None, image_sentinel=0,
):  # fmt: skip
    _check(weights, ids, logits, scoring, tokens_in, hash_table, image_bias)
    rows = rows_of(logits)
    bias, image_bias = (v if v is None else v.float().contiguous() for v in (bias, image_bias))
    tokens_in = tokens_in if tokens_in is None else tokens_in.long().contiguous()
    hash_table = hash_table if hash_table is None else hash_table.int().contiguous()
    module.topk_routing(
        dtype_name(logits, "topk_routing"), scoring, ptr(weights), ptr(ids), ptr(token_expert), ptr(rows), ptr(bias),
        ptr(is_padding), ptr(tokens_in), ptr(hash_table), ptr(image_bias), image_sentinel, rows.stride(0), *rows.shape,
        ids.shape[1], groups, topk_group, renormalize, ids.dtype == torch.int64, scale, stream(logits),
    )  # fmt: skip


topk_routing = register(
    "topk_routing",
    "(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!)? token_expert, Tensor logits, str scoring, bool renormalize, "
    "float scale=1.0, Tensor? bias=None, Tensor? is_padding=None, int groups=1, int topk_group=1, "
    "Tensor? tokens_in=None, Tensor? hash_table=None, Tensor? image_bias=None, int image_sentinel=0) -> ()",
    reference=topk_routing_reference,
    fake=lambda *_, **__: None,
    kernel=topk_routing_kernel,
)
"""Choose the best experts of score + bias for each token; their weights are scores alone.

weights         (tokens, topk) float32: scores of the chosen, best first, summing to scale if renormalize, else times it
ids             (tokens, topk) int32 or int64: the chosen experts, the lower of equals first
token_expert    (tokens, topk) int32 or None: token + tokens * choice
logits          (tokens, experts) float16, bfloat16 or float32, at most 1536 experts; rows may be strided
scoring         a key of SCORINGS, computed in float32
bias            (experts) or None, added for the choice only
is_padding      (tokens) bool or None: such tokens get weight 0 and expert -1
groups          equal groups of experts, at most 32, of which topk_group take part: those with the best expert, or with
                the best sum of two when there is a bias (DeepSeek-V3, arXiv:2412.19437)
tokens_in       (tokens) token ids, for hash_table (vocabulary, topk): the experts of each token id, instead of a choice
image_bias      (experts): bias of image tokens, ids [image_sentinel, image_sentinel + 5), which always choose

Raises ValueError for an unknown scoring and for outputs that do not fit.
"""
