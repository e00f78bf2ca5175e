# SPDX-License-Identifier: BSD-3-Clause
"""GGUF types with blocks of 32 values: how a file's blocks become planes, and what planes mean (formats.blocks).

Oracle: ``gguf.quants.dequantize``. Device codec: csrc/formats/gguf_basic.cuh.
"""

import torch

from vllm_superl8.formats.bits import UNIT, fields, pack1, unpack1, unpack4
from vllm_superl8.formats.blocks import Codec, Decoded, halves, signed

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for (gguf.quants.IQ4_NL.kvalues)."""

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The same for MXFP4 (gguf.quants.MXFP4.kvalues)."""


def looked_up(codes: torch.Tensor, levels: tuple[int, ...]) -> torch.Tensor:
    """Packed 4-bit codes (..., 16) -> the levels that they name, (..., 32) int8."""
    return torch.tensor(levels, dtype=torch.int8, device=codes.device)[unpack4(codes).int()]


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """The fifth bits of a block, bit j being value j's, in the order of a plane."""
    return pack1(fields(stored, 1).transpose(-1, -2).flatten(-2))


def _pack_q4_0(blocks):
    return blocks[..., 2:], blocks[..., :2]


def _decode_q4_0(codes, d):
    return Decoded(signed(unpack4(codes), 8), halves(d))


def _pack_q4_1(blocks):
    return blocks[..., 4:], blocks[..., :4]


def _decode_q4_1(codes, dm):
    return Decoded(unpack4(codes), halves(dm)[..., :1], halves(dm)[..., 1:])


def _pack_q5_0(blocks):
    return blocks[..., 6:], _fifth_bits(blocks[..., 2:6]), blocks[..., :2]


def _decode_q5_0(codes, fifth, d):
    return Decoded(signed(unpack4(codes) | unpack1(fifth) << 4, 16), halves(d))


def _pack_q5_1(blocks):
    return blocks[..., 8:], _fifth_bits(blocks[..., 4:8]), blocks[..., :4]


def _decode_q5_1(codes, fifth, dm):
    return Decoded(unpack4(codes) | unpack1(fifth) << 4, halves(dm)[..., :1], halves(dm)[..., 1:])


def _decode_iq4_nl(codes, d):
    return Decoded(looked_up(codes, IQ4_LEVELS), halves(d))


def _pack_mxfp4(blocks):
    return blocks[..., 1:], blocks[..., :1]


def _decode_mxfp4(codes, exponent):
    # 2^(e - 128): the values are stored doubled. Exponents below 2 are subnormal.
    bits = exponent.int()
    bits = torch.where(bits < 2, 0x00200000 << bits, (bits - 1) << 23)
    return Decoded(looked_up(codes, E2M1_DOUBLED), bits.view(torch.float32))


def _pack_q8_0(blocks):
    return blocks[..., 2:18], blocks[..., 18:], blocks[..., :2]


def _decode_q8_0(first, last, d):
    return Decoded(torch.cat((first, last), -1).view(torch.int8), halves(d))


def quantize_q8_0(weight: torch.Tensor) -> list[torch.Tensor]:
    """weight (n, k) float, k a multiple of 32 -> planes of "q8_0": scale max|w| / 127 rounded to fp16, codes with that.

    A group whose scale is too large or too small for fp16 is infinite or zero.
    """
    groups = weight.float().unflatten(1, (-1, UNIT))
    scales = (groups.abs().amax(-1) / 127).half()
    codes = torch.round(groups / scales.float().unsqueeze(-1)).nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    first, last = codes.view(torch.uint8).split(UNIT // 2, -1)
    return [first.flatten(1).contiguous(), last.flatten(1).contiguous(), scales.view(torch.uint8)]


CODECS = {
    "q4_0": Codec(_pack_q4_0, _decode_q4_0),
    "q4_1": Codec(_pack_q4_1, _decode_q4_1),
    "q5_0": Codec(_pack_q5_0, _decode_q5_0),
    "q5_1": Codec(_pack_q5_1, _decode_q5_1),
    "iq4_nl": Codec(_pack_q4_0, _decode_iq4_nl),
    "mxfp4": Codec(_pack_mxfp4, _decode_mxfp4),
    "q8_0": Codec(_pack_q8_0, _decode_q8_0),
}
