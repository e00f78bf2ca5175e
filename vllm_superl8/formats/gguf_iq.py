# SPDX-License-Identifier: BSD-3-Clause
"""GGUF's IQ types whose codes are entries of a codebook: how a file's blocks become planes, and what planes mean.

Four or eight neighbouring values are named by one number; IQ2 and IQ3 have signs apart. Codebooks are those of the gguf
package (read at run time, none is copied here), as int8 codes. Oracle: ``gguf.quants.dequantize``. Device codec:
csrc/formats/gguf_iq.cuh.
"""

from functools import cache

import torch
from gguf import quants

from vllm_superl8.formats.bits import UNIT, fields, pack1, unpack1
from vllm_superl8.formats.blocks import Codec, Decoded, halves

TERNARY_ZERO = 9
"""IQ1 adds or takes off an eighth: value = scale / 8 * (code - 9), code = 8 * (entry + 1) + 2 or + 0."""


@cache
def codebook(name: str, device: torch.device) -> torch.Tensor:
    """Entries of a type's codebook, (entries, 4 or 8) int8; for IQ1 they are 8 * (entry + 1)."""
    kind = getattr(quants, name.upper())
    kind.init_grid()
    grid = torch.from_numpy(kind.grid.reshape(kind.grid_shape))
    if name.startswith("iq1"):
        grid = 8 * (grid + 1)
    return grid.to(device, torch.int8)


def _entries(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Codes (..., 8, 32) that the numbers (..., 8, 4 or 8) name."""
    return codebook(name, numbers.device)[numbers.int()].flatten(-2)


def _words(plane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Little-endian integers of a plane, as int32; 32-bit ones may be negative."""
    words = plane.contiguous().view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _by_unit(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Fields (..., bytes, 8 / width) of the bytes of a plane, the lowest first."""
    return fields(packed, width).transpose(-1, -2)


def _negative(signs: torch.Tensor) -> torch.Tensor:
    """1 for positive and -1 for negative, int8, of sign bits."""
    return 1 - 2 * signs.to(torch.int8)


def _paired_signs(numbers: torch.Tensor) -> torch.Tensor:
    """Signs (..., 8, 32) of seven bits (..., 8, 4) each for eight values: the eighth makes their number even."""
    parity = numbers ^ numbers >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    bits = (numbers | parity << 7).to(torch.uint8)
    return _negative(fields(bits.unsqueeze(-1), 1).flatten(-3))


def _pack_signs(stored: torch.Tensor) -> torch.Tensor:
    """Sign bits of 256 values in order -> a plane that unpack1 reads."""
    return pack1(_by_unit(stored, 1).flatten(-2).unflatten(-1, (-1, UNIT))).flatten(-2)


def _plain_signs(plane: torch.Tensor) -> torch.Tensor:
    return _negative(unpack1(plane.unflatten(-1, (8, 4))))


def _pack_iq2_xxs(blocks):
    return blocks[..., 2:], blocks[..., :2]


def _decode_iq2_xxs(codes, d):
    codes = codes.unflatten(-1, (8, 8))
    rest = _words(codes[..., 4:], torch.int32)
    signs = rest >> torch.tensor([0, 7, 14, 21], device=d.device) & 127
    scales = halves(d) * (0.5 + (rest.squeeze(-1) >> 28 & 15)) * 0.25
    return Decoded(_entries("iq2_xxs", codes[..., :4]) * _paired_signs(signs), scales)


def _pack_iq2_xs(blocks):
    d, codes, scales = blocks.split((2, 64, 8), -1)
    return codes, scales, d


def _decode_iq2_xs(codes, scales, d):
    words = _words(codes, torch.int16).unflatten(-1, (8, 4))
    scales = halves(d) * (0.5 + _by_unit(scales, 4).flatten(-2)) * 0.25
    return Decoded(_entries("iq2_xs", words & 511) * _paired_signs(words >> 9), scales)


def _pack_iq2_s(blocks):
    d, codes, signs, high, scales = blocks.split((2, 32, 32, 8, 8), -1)
    return codes, _pack_signs(signs), high, scales, d


def _decode_iq2_s(codes, signs, high, scales, d):
    numbers = codes.unflatten(-1, (8, 4)).int() | _by_unit(high, 2).int() << 8
    scales = halves(d) * (0.5 + _by_unit(scales, 4).flatten(-2)) * 0.25
    return Decoded(_entries("iq2_s", numbers) * _plain_signs(signs), scales)


def _pack_iq3_xxs(blocks):
    d, codes, rest = blocks.split((2, 64, 32), -1)
    return codes, rest, d


def _decode_iq3_xxs(codes, rest, d):
    rest = _words(rest, torch.int32).unsqueeze(-1)
    signs = rest >> torch.tensor([0, 7, 14, 21], device=d.device) & 127
    scales = halves(d) * (0.5 + (rest.squeeze(-1) >> 28 & 15)) * 0.5
    return Decoded(_entries("iq3_xxs", codes.unflatten(-1, (8, 8))) * _paired_signs(signs), scales)


def _pack_iq3_s(blocks):
    d, codes, high, signs, scales = blocks.split((2, 64, 8, 32, 4), -1)
    return codes, _pack_signs(signs), high, scales, d


def _decode_iq3_s(codes, signs, high, scales, d):
    numbers = codes.unflatten(-1, (8, 8)).int() | _by_unit(high, 1).int() << 8
    scales = halves(d) * (1 + 2 * _by_unit(scales, 4).flatten(-2))
    return Decoded(_entries("iq3_s", numbers) * _plain_signs(signs), scales)


def _shifted(entries: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """IQ1's codes of entries (..., 8, 32), for each 8 (or all) of which `up` (..., 8, 4 or 1) is true or false."""
    return entries + 2 * up.to(torch.int8).repeat_interleave(UNIT // up.shape[-1], -1) - TERNARY_ZERO


def _pack_iq1_s(blocks):
    d, codes, rest = blocks.split((2, 32, 16), -1)
    return codes, rest, d


def _decode_iq1_s(codes, rest, d):
    rest = _words(rest, torch.int16).unsqueeze(-1)
    high = rest >> torch.tensor([0, 3, 6, 9], device=d.device) & 7
    scales = halves(d) * (2 * (rest.squeeze(-1) >> 12 & 7) + 1) / 8
    entries = _entries("iq1_s", codes.unflatten(-1, (8, 4)).int() | high << 8)
    return Decoded(_shifted(entries, rest >> 15 == 0), scales)


def _pack_iq1_m(blocks):
    return blocks.split((32, 16, 8), -1)


def _decode_iq1_m(codes, rest, scales):
    rest = _by_unit(rest, 4).flatten(-2).unflatten(-1, (8, 4)).int()
    words = _words(scales, torch.int16)
    bits = (words >> 12) << torch.tensor([0, 4, 8, 12], device=words.device)
    d = halves(bits.sum(-1, keepdim=True).to(torch.int16).view(torch.uint8))
    scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], device=words.device) & 7).flatten(-2)
    entries = _entries("iq1_m", codes.unflatten(-1, (8, 4)).int() | (rest & 7) << 8)
    return Decoded(_shifted(entries, rest & 8 == 0), d * (2 * scales + 1) / 8)


CODECS = {
    "iq1_s": Codec(_pack_iq1_s, _decode_iq1_s),
    "iq1_m": Codec(_pack_iq1_m, _decode_iq1_m),
    "iq2_xxs": Codec(_pack_iq2_xxs, _decode_iq2_xxs),
    "iq2_xs": Codec(_pack_iq2_xs, _decode_iq2_xs),
    "iq2_s": Codec(_pack_iq2_s, _decode_iq2_s),
    "iq3_xxs": Codec(_pack_iq3_xxs, _decode_iq3_xxs),
    "iq3_s": Codec(_pack_iq3_s, _decode_iq3_s),
}
