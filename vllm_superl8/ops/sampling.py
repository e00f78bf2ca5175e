# SPDX-License-Identifier: BSD-3-Clause
"""What sampling needs on logits: greedy argmax, Gumbel-max sampling and repetition penalties."""

import torch

from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream


def greedy_argmax_reference(logits):
    return logits.argmax(-1)


def greedy_argmax_fake(logits):
    return torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)


def greedy_argmax_kernel(module, logits):
    out, rows = greedy_argmax_fake(logits), rows_of(logits)
    module.greedy_argmax(
        dtype_name(logits, "greedy_argmax"), ptr(out), ptr(rows), *rows.shape, rows.stride(0), stream(logits)
    )  # fmt: skip
    return out


greedy_argmax = register(
    "greedy_argmax",
    "(Tensor logits) -> Tensor",
    reference=greedy_argmax_reference,
    fake=greedy_argmax_fake,
    kernel=greedy_argmax_kernel,
)
"""Index of each row's largest logit, the first of equals; NaN counts as largest.

logits (..., vocab) float16, bfloat16 or float32; returns (...) int64
"""


def apply_repetition_penalties_reference(logits, prompt_mask, output_mask, penalties):
    seen = prompt_mask | output_mask
    factor = torch.where(seen, penalties.float().unsqueeze(-1), 1.0)
    v = logits.float()
    logits.copy_(torch.where(v > 0, v / factor, v * factor))


def apply_repetition_penalties_kernel(module, logits, prompt_mask, output_mask, penalties):
    if logits.stride(-1) != 1 or logits.dim() != 2:
        raise ValueError(f"apply_repetition_penalties: logits are {tuple(logits.shape)} with strides {logits.stride()}")
    masks = [mask.contiguous() for mask in (prompt_mask, output_mask)]
    penalties = penalties.float().contiguous()
    module.repetition_penalty(
        dtype_name(logits, "apply_repetition_penalties"), ptr(logits), ptr(masks[0]), ptr(masks[1]), ptr(penalties),
        *logits.shape, logits.stride(0), stream(logits),
    )  # fmt: skip


apply_repetition_penalties = register(
    "apply_repetition_penalties",
    "(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, Tensor penalties) -> ()",
    reference=apply_repetition_penalties_reference,
    fake=lambda *_: None,
    kernel=apply_repetition_penalties_kernel,
)
"""logits of tokens in either mask are divided by their row's penalty if positive, else multiplied by it, in place.

logits (rows, vocab) float16, bfloat16 or float32, rows may be strided; masks (rows, vocab) bool; penalties (rows)
"""


_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def _split_mix(state):
    """SplitMix64's output function of int64 states, in place (Steele et al. 2014, doi:10.1145/2660193.2660195)."""
    for shift, factor in _MIXERS:
        state ^= (state >> shift) & (2 ** (64 - shift) - 1)  # int64 shifts keep the sign, this one must not
        state *= factor
    state ^= (state >> 31) & (2**33 - 1)
    return state


def _gumbel(seeds, tokens):
    """Gumbel noise as a function of (seed, token): entry `token` of the stream that the mixed seed starts."""
    bits = _split_mix(_split_mix(seeds + _GAMMA) + (tokens + 1) * _GAMMA)
    uniform = ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)  # in (0, 1), ends excluded
    return uniform.log_().neg_().log_().neg_().float()


def gumbel_argmax_reference(logits, seeds):
    """Tokens at -inf cannot win, so that noise is made for the others only: few are left after top-k or top-p."""
    if logits.shape[-1] == 0:
        raise ValueError("gumbel_argmax: a row has no logits")
    rows, tokens = torch.nonzero(~torch.isneginf(logits), as_tuple=True)
    if rows.numel() == logits.numel():
        noisy = logits + _gumbel(seeds.unsqueeze(-1), torch.arange(logits.shape[-1], device=logits.device))
    else:
        noisy = torch.full_like(logits, -torch.inf)
        noisy[rows, tokens] = logits[rows, tokens] + _gumbel(seeds[rows], tokens)
    return noisy.argmax(-1)


gumbel_argmax = register(
    "gumbel_argmax",
    "(Tensor logits, Tensor seeds) -> Tensor",
    reference=gumbel_argmax_reference,
    fake=lambda logits, seeds: torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device),
    kernel=None,
)
"""One token of each row, drawn with the probabilities softmax(logits), by the Gumbel-max trick.

logits (rows, vocab) float32; seeds (rows) int64; returns (rows) int64. The noise is a function of (seed, token) alone:
the same seed gives the same draw whatever else is in the batch. Waits for the GPU when given CUDA tensors.
"""
