# SPDX-License-Identifier: BSD-3-Clause
"""Codes of a few bits out of the words that checkpoints pack them into."""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, of the i-th nibble of an AWQ word, lowest first."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the E2M1 codes, the element type of MXFP4 and NVFP4 (OCP Microscaling Formats 1.0, table 5)."""


def unpack(words: torch.Tensor, bits: int, dim: int, size: int, straddle: bool = False) -> torch.Tensor:
    """Codes of `bits` bits, lowest first, packed along dimension `dim`.

    words     (.., words, ..) int32
    size      codes along `dim` to return, the rest is padding
    straddle  a code may begin in one word and end in the next (GPTQ's 3 bits: 32 codes in 3 words); else a word holds
              32 // bits whole codes and some unused bits
    returns   uint8, `dim` of length `size`
    """
    words = words.movedim(dim, -1)
    per_run, words_a_run = (32, bits) if straddle and 32 % bits else (32 // bits, 1)
    runs = words.unflatten(-1, (-1, words_a_run))
    codes = torch.empty(*runs.shape[:-1], per_run, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for index in range(per_run):
        word, shift = divmod(index * bits, 32)
        code = runs[..., word] >> shift
        kept = 32 - shift
        if kept < bits:
            code = (code & ((1 << kept) - 1)) | (runs[..., word + 1] << kept)
        codes[..., index] = (code & mask).to(torch.uint8)
    return codes.flatten(-2)[..., :size].movedim(-1, dim)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words (rows, n / 8) int32 -> codes (rows, n) uint8."""
    nibbles = unpack(words, 4, 1, words.shape[1] * 8).unflatten(1, (-1, 8))
    order = torch.tensor(AWQ_ORDER, device=words.device)
    return nibbles[..., torch.argsort(order)].flatten(1)


def nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """(.., bytes) uint8 -> (.., 2 * bytes) uint8 of 0 to 15; the even one is in the low half unless high_first."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, -1).flatten(-2)


def table_values(codes: torch.Tensor, table) -> torch.Tensor:
    """table[codes] in float32; table: 16 numbers."""
    return torch.as_tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two from E8M0 bytes (uint8; OCP Microscaling Formats 1.0): 2^(byte - 127), 255 is NaN."""
    values = torch.exp2(exponents.float() - 127)
    return torch.where(exponents == 255, torch.full_like(values, torch.nan), values)
