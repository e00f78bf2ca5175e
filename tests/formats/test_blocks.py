# SPDX-License-Identifier: BSD-3-Clause
"""Planes of every GGUF type against gguf.quants, bit for bit, and what is refused."""

import gguf
import numpy as np
import pytest
import torch
from blocks import GGUF_FORMATS, stored, weights
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm_superl8.formats import bits, blocks
from vllm_superl8.formats.layout import GGML, LAYOUTS


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_planes_are_worth_what_gguf_says(format):
    layout = LAYOUTS[format]
    rows = stored(format, 7, 3 * layout.values)
    planes = blocks.pack(torch.from_numpy(rows), layout)
    want = gguf.quants.dequantize(rows, GGMLQuantizationType[layout.ggml])
    got = blocks.dequantize(planes, layout)
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), want)
    assert np.abs(want).max(-1).min() > 0


def test_mxfp4_takes_every_exponent():
    rows = np.tile(np.arange(17, dtype=np.uint8) * 7, (255, 1))
    rows[:, 0] = np.arange(255)  # 255 is NaN
    want = gguf.quants.dequantize(rows, GGMLQuantizationType.MXFP4)
    got = blocks.dequantize(blocks.pack(torch.from_numpy(rows), GGML["MXFP4"]), GGML["MXFP4"])
    assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_planes_are_as_many_bytes_as_the_file_has(format):
    layout = LAYOUTS[format]
    assert (layout.values, layout.bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[layout.ggml]]
    planes = weights(format, 3, 2 * layout.values).planes
    assert [plane.shape[1] for plane in planes] == [2 * size for size in layout.planes]
    assert sum(layout.planes) == layout.bytes
    blocks.check_planes(planes, layout, 2 * layout.values)


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_every_byte_of_a_block_reaches_the_planes(format):
    layout = LAYOUTS[format]
    rows = torch.from_numpy(stored(format, 1, layout.values))
    whole = torch.cat([plane.flatten() for plane in blocks.pack(rows, layout)])
    for byte in range(layout.bytes):
        changed = rows.clone()
        changed[0, byte] ^= 255
        bits_changed = torch.cat([plane.flatten() for plane in blocks.pack(changed, layout)]) ^ whole
        assert sum(int(value).bit_count() for value in bits_changed) == 8, byte


@pytest.mark.parametrize(("pack", "unpack", "width"), [(bits.pack4, bits.unpack4, 4), (bits.pack2, bits.unpack2, 2),
                                                       (bits.pack1, bits.unpack1, 1)])  # fmt: skip
def test_packed_bits_are_unpacked_and_stand_where_a_kernel_expects_them(pack, unpack, width):
    codes = torch.randint(0, 1 << width, (5, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes)
    assert packed.shape == (5, 4 * width) and torch.equal(unpack(packed), codes)
    words = packed.contiguous().view(torch.int32)
    for value in range(32):  # value 4 i + b: byte b of word i
        i, b = divmod(value, 4)
        word, shift = {4: (i % 4, 4 * (i // 4)), 2: (i // 4, 2 * (i % 4)), 1: (0, i)}[width]
        got = words[:, word].long() >> (8 * b + shift) & (1 << width) - 1
        assert torch.equal(got, codes[:, value].long())


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"q4_k: rows are \(2, 145\) torch.uint8, wanted \(n, bytes\) uint8"):
        blocks.pack(torch.zeros(2, 145, dtype=torch.uint8), GGML["Q4_K"])
    with pytest.raises(ValueError, match="weights of format 'int8': wanted one of int4, int4_zero, int3, q4_0"):
        blocks.layout_of("int8")
    w = weights("q4_k", 3, 512)
    with pytest.raises(ValueError, match=r"q4_k: planes are .* for rows of 256"):
        blocks.check_planes(w.planes, GGML["Q4_K"], 256)
    with pytest.raises(ValueError, match="q4_k: k is 320, wanted a multiple of the block's 256 values"):
        blocks.check_planes(w.planes, GGML["Q4_K"], 320)
