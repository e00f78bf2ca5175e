# SPDX-License-Identifier: BSD-3-Clause
"""GGUF's K types, blocks of 256 values: how a file's blocks become planes, and what planes mean (formats.blocks).

Oracle: ``gguf.quants.dequantize``. Device codec: csrc/formats/gguf_k.cuh.
"""

import torch

from vllm_superl8.formats.bits import UNIT, fields, pack1, pack2, pack4, unpack1, unpack2, unpack4
from vllm_superl8.formats.blocks import Codec, Decoded, halves, signed
from vllm_superl8.formats.gguf_basic import IQ4_LEVELS, looked_up


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


def _pack_q5_k(blocks):
    header, high, low = blocks.split((16, 32, 128), -1)
    high = _units(fields(high, 1))
    return pack4(_nibbles(low, 32)).flatten(2), pack1(high).flatten(2), header


def _decode_q5_k(codes, fifth, header):
    found = _decode_q4_k(codes, header)
    high = unpack1(fifth.unflatten(-1, (8, 4))) << 4
    return Decoded(found.codes | high, found.scales, found.minima)


def _crumbs(stored: torch.Tensor) -> torch.Tensor:
    """Codes (..., 8, 32) of 64 bytes, of which each 32 hold the lowest two bits of 32 values, then the next two ..."""
    return _units(fields(stored.unflatten(-1, (2, 32)), 2))


def _pack_q2_k(blocks):
    scales, codes, d = blocks.split((16, 64, 4), -1)
    return pack2(_crumbs(codes)).flatten(2), scales, d


def _decode_q2_k(codes, scales, d):
    d, dmin = halves(d).split(1, -1)
    return Decoded(unpack2(codes.unflatten(-1, (8, 8))), d * (scales & 15), -(dmin * (scales >> 4)))


def _pack_q3_k(blocks):
    high, low, scales, d = blocks.split((32, 64, 12, 2), -1)
    return pack2(_crumbs(low)).flatten(2), pack1(_units(fields(high, 1))).flatten(2), scales, d


def _decode_q3_k(low, high, scales, d):
    codes = unpack2(low.unflatten(-1, (8, 8))) | unpack1(high.unflatten(-1, (8, 4))) << 2
    scales = fields(scales[..., :8], 4).flatten(-2) | fields(scales[..., 8:], 2).flatten(-2) << 4
    return Decoded(signed(codes, 4), halves(d) * signed(scales, 32))


def _pack_iq4_xs(blocks):
    return blocks[..., 8:], blocks[..., :8]


def _decode_iq4_xs(codes, header):
    high, low = fields(header[..., 2:4], 2), fields(header[..., 4:], 4)  # (.., 4, 2) and (.., 2, 4)
    scales = low.transpose(-1, -2).flatten(-2) | high.transpose(-1, -2).flatten(-2) << 4
    return Decoded(looked_up(codes.unflatten(-1, (8, 16)), IQ4_LEVELS), halves(header[..., :2]) * signed(scales, 32))


def _pack_tq1_0(blocks):
    return blocks.split((48, 4, 2), -1)


def _decode_tq1_0(five, four, d):
    # A byte is a fraction of 256: times 3, the whole part is the next digit.
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=d.device).unsqueeze(-1)
    parts = (five[..., None, :32] * powers, five[..., None, 32:] * powers, four.unsqueeze(-2) * powers[:4])
    digits = torch.cat([part.flatten(-2) for part in parts], -1).int() * 3 >> 8
    return Decoded(digits.to(torch.int8) - 1, halves(d))


def _pack_tq2_0(blocks):
    return pack2(_crumbs(blocks[..., :64])).flatten(2), blocks[..., 64:]


def _decode_tq2_0(codes, d):
    return Decoded(signed(unpack2(codes.unflatten(-1, (8, 8))), 1), halves(d))


def _pack_q6_k(blocks):
    low, high, scales, d = blocks.split((128, 64, 16, 2), -1)
    high = _units(fields(high.unflatten(-1, (2, 32)), 2))
    return pack4(_nibbles(low, 64)).flatten(2), pack2(high).flatten(2), scales, d


def _decode_q6_k(low, high, scales, d):
    codes = unpack4(low.unflatten(-1, (8, 16))) | unpack2(high.unflatten(-1, (8, 8))) << 4
    return Decoded(signed(codes, 32), halves(d) * scales.view(torch.int8))


CODECS = {
    "q2_k": Codec(_pack_q2_k, _decode_q2_k),
    "q3_k": Codec(_pack_q3_k, _decode_q3_k),
    "q4_k": Codec(_pack_q4_k, _decode_q4_k),
    "q5_k": Codec(_pack_q5_k, _decode_q5_k),
    "q6_k": Codec(_pack_q6_k, _decode_q6_k),
    "iq4_xs": Codec(_pack_iq4_xs, _decode_iq4_xs),
    "tq1_0": Codec(_pack_tq1_0, _decode_tq1_0),
    "tq2_0": Codec(_pack_tq2_0, _decode_tq2_0),
}
