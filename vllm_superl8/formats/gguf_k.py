# SPDX-License-Identifier: BSD-3-Clause
"""GGUF's K types, blocks of 256 values: how a file's blocks become planes, and what planes mean (formats.blocks).

Oracle: ``gguf.quants.dequantize``. Device codec: csrc/formats/gguf_k.cuh.
"""

import torch

from vllm_superl8.formats.bits import UNIT, fields, pack2, pack4, unpack2, unpack4
from vllm_superl8.formats.blocks import Codec, Decoded, halves, signed


def _units(codes: torch.Tensor) -> torch.Tensor:
    """Codes of a block, in any shape but in order, as (..., 8, 32)."""
    return codes.flatten(2).unflatten(-1, (-1, UNIT))


def _nibbles(stored: torch.Tensor, run: int) -> torch.Tensor:
    """Codes (..., 8, 32) of a block whose low halves of `run` bytes come before their high halves."""
    return _units(fields(stored.unflatten(-1, (-1, run)), 4))


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes (..., 12) -> eight 6-bit scales and eight minima (..., 8) uint8."""
    a, b, c = packed.split(4, -1)
    scales = torch.cat((a & 63, c & 15 | a >> 2 & 48), -1)
    minima = torch.cat((b & 63, c >> 4 | b >> 2 & 48), -1)
    return scales, minima


def _pack_q4_k(blocks):
    return pack4(_nibbles(blocks[..., 16:], 32)).flatten(2), blocks[..., :16]


def _decode_q4_k(codes, header):
    d, dmin = halves(header[..., :4]).split(1, -1)
    scales, minima = _scales_and_minima(header[..., 4:])
    return Decoded(unpack4(codes.unflatten(-1, (8, 16))), d * scales, -dmin * minima)


def _pack_q6_k(blocks):
    low, high, scales, d = blocks.split((128, 64, 16, 2), -1)
    high = _units(fields(high.unflatten(-1, (2, 32)), 2))
    return pack4(_nibbles(low, 64)).flatten(2), pack2(high).flatten(2), scales, d


def _decode_q6_k(low, high, scales, d):
    codes = unpack4(low.unflatten(-1, (8, 16))) | unpack2(high.unflatten(-1, (8, 8))) << 4
    return Decoded(signed(codes, 32), halves(d) * scales.view(torch.int8))


CODECS = {"q4_k": Codec(_pack_q4_k, _decode_q4_k), "q6_k": Codec(_pack_q6_k, _decode_q6_k)}
