# SPDX-License-Identifier: BSD-3-Clause
"""What sampling needs on logits: greedy argmax and repetition penalties."""

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
