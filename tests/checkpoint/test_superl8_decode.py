# SPDX-License-Identifier: BSD-3-Clause
"""Values of every scheme, from codes packed by hand as the format's description says."""

import gguf
import numpy as np
import pytest
import torch

from vllm_superl8.checkpoint.superl8_decode import NF4, decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer
from vllm_superl8.formats.container import SCHEMES


def stored(tmp_path, codes, scheme, scales=None, **options):
    """A file with tensor w."""
    with Superl8Writer(tmp_path / "m.superl8") as writer:
        if scales is not None:
            writer.add("s", scales)
        writer.add("w", codes, scheme, scale=None if scales is None else "s", **options)
    return Superl8File(tmp_path / "m.superl8")


def test_every_scheme_is_tested():
    assert set(SCHEMES) == {"per_row_i8", "per_chan_i8", "per_group_i8", "per_group_i4", "per_group_w3a8",
                            "gguf_kquant", "raw"}  # fmt: skip


@pytest.mark.parametrize("scheme", ["per_row_i8", "per_chan_i8"])
@pytest.mark.parametrize("columns", [(3,), (3, 1)], ids=str)
def test_rows_have_their_scale(tmp_path, scheme, columns):
    codes = torch.randint(-127, 128, (3, 10), dtype=torch.int8)
    scales = torch.tensor([0.5, 2.0, 1e5])
    got = decode(stored(tmp_path, codes, scheme, scales.view(columns)), "w")
    assert torch.equal(got, codes.float() * scales[:, None])


@pytest.mark.parametrize("k", [256, 200, 128, 100])
def test_groups_have_their_scale(tmp_path, k):
    codes = torch.randint(-127, 128, (5, k), dtype=torch.int8)
    scales = torch.rand(5, -(-k // 128)) + 0.1
    got = decode(stored(tmp_path, codes, "per_group_i8", scales, group_size=128), "w")
    for column in range(k):
        assert torch.equal(got[:, column], codes[:, column] * scales[:, column // 128])


@pytest.mark.parametrize("codebook", ["int4", "nf4"])
def test_four_bits_have_the_even_column_low(tmp_path, codebook):
    generator = torch.Generator().manual_seed(1)
    low, high = -7 if codebook == "int4" else 0, 8 if codebook == "int4" else 16
    codes = torch.randint(low, high, (3, 64), generator=generator)
    packed = torch.tensor(
        [[(row[2 * i] & 15) | (row[2 * i + 1] & 15) << 4 for i in range(32)] for row in codes.tolist()]
    )
    scales = torch.rand(3, 2) + 0.1
    file = stored(tmp_path, packed.to(torch.uint8), "per_group_i4", scales, group_size=32, codebook=codebook)
    values = codes.float() if codebook == "int4" else torch.tensor(NF4)[codes]
    assert torch.equal(decode(file, "w"), values * scales.repeat_interleave(32, 1))


def test_three_bits_lie_in_three_planes(tmp_path):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-4, 4, (2, 96), generator=generator)
    words = []
    for row in codes.tolist():
        words.append([])
        for block in range(3):
            planes = [0, 0, 0]
            for j, code in enumerate(row[32 * block : 32 * block + 32]):
                b, s = j & 3, j >> 2
                bits = code & 7  # two's complement
                planes[0 if j < 16 else 1] |= (bits & 3) << (8 * b + 2 * (s % 4))
                planes[2] |= (1 - (bits >> 2)) << (8 * b + s)
            words[-1] += planes
    packed = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    scales = torch.rand(2, 3) + 0.1
    got = decode(stored(tmp_path, packed, "per_group_w3a8", scales, group_size=32), "w")
    assert torch.equal(got, codes * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("kind", ["Q4_0", "q8_0"])
def test_gguf_blocks_are_what_gguf_says(tmp_path, kind):
    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind.upper()]
    packed = gguf.quants.quantize(values, number)
    file = stored(tmp_path, torch.from_numpy(packed), "gguf_kquant", codebook=kind)
    assert np.array_equal(decode(file, "w").numpy(), gguf.quants.dequantize(packed, number))


def test_unknown_gguf_types_are_named(tmp_path):
    file = stored(tmp_path, torch.zeros(2, 32, dtype=torch.uint8), "gguf_kquant", codebook="Q9_X")
    with pytest.raises(ContainerError, match=r"tensor w holds GGUF type 'Q9_X'"):
        decode(file, "w")


def test_rotated_weights_are_refused(tmp_path):
    with Superl8Writer(tmp_path / "m.superl8") as writer:
        writer.add("w", torch.ones(2, 2))
        writer.rows["w"] |= {"rotated": True, "hadamard_dim": 128}
    with pytest.raises(ContainerError, match="tensor w is rotated"):
        decode(Superl8File(tmp_path / "m.superl8"), "w")


def test_large_matrices_are_decoded_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_superl8.checkpoint.superl8_decode.CHUNK_VALUES", 30)
    codes, scales = torch.randint(-127, 128, (11, 10), dtype=torch.int8), torch.rand(11)
    file = stored(tmp_path, codes, "per_row_i8", scales)
    assert torch.equal(decode(file, "w", torch.bfloat16), (codes.float() * scales[:, None]).bfloat16())
