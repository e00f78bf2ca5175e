# SPDX-License-Identifier: BSD-3-Clause
"""Tensors are decoded as gguf.quants.dequantize does, for every type it knows and in pieces."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from vllm_superl8.checkpoint import gguf_tensors
from vllm_superl8.checkpoint.gguf_header import Tensor

ROWS, COLUMNS = 50, 512


def decodes(kind):
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTISED = [kind for kind in Type if kind not in gguf_tensors.PLAIN and decodes(kind)]


def stored(path, kind, values: np.ndarray, shape, offset=64) -> Tensor:
    path.write_bytes(bytes(offset) + values.tobytes())
    return Tensor("blk.0.x.weight", shape, kind, path, offset)


def random_blocks(kind):
    """Blocks of random bytes, those of the float types from real quantisation where gguf has one."""
    values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    try:
        return gguf.quants.quantize(rng.standard_normal((ROWS, COLUMNS), np.float32) + 0.3, kind)
    except NotImplementedError:
        return rng.integers(0, 60, (ROWS, COLUMNS // values * block_bytes), np.uint8)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [1 << 24, 7 * COLUMNS, 1], ids=["whole", "seven-rows", "one-row"])
def test_read_matches_gguf_dequantize(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(gguf_tensors, "CHUNK_VALUES", chunk)
    blocks = random_blocks(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert expected.abs().max() > 0
    got = gguf_tensors.read(stored(tmp_path / "t", kind, blocks, (ROWS, COLUMNS)), torch.float32)
    assert torch.equal(got, expected)


def test_types_tested_are_those_of_real_files():
    names = {kind.name for kind in QUANTISED}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"} <= names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", gguf_tensors.PLAIN, ids=lambda kind: kind.name)
def test_plain_types_are_taken_as_they_are(tmp_path, kind, dtype):
    torch.manual_seed(1)
    values = torch.randn(3, 5, 7).to(gguf_tensors.PLAIN[kind])
    tensor = stored(tmp_path / "t", kind, values.view(torch.uint8).numpy(), (3, 5, 7))
    before = tensor.path.read_bytes()
    got = gguf_tensors.read(tensor, dtype)
    assert torch.equal(got, values.to(dtype))
    got.zero_()
    assert tensor.path.read_bytes() == before


def test_three_dimensions_keep_their_shape(tmp_path):
    blocks = random_blocks(Type.Q8_0)
    got = gguf_tensors.read(stored(tmp_path / "t", Type.Q8_0, blocks, (5, 10, COLUMNS)), torch.bfloat16)
    assert torch.equal(got.flatten(0, 1), torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q8_0)).bfloat16())


@pytest.mark.parametrize("kind", [Type.I32, Type.Q8_K, Type.F64], ids=lambda kind: kind.name)
def test_check_refuses_types_without_a_decoder(tmp_path, kind):
    tensor = Tensor("blk.0.x.weight", (1, 256), kind, tmp_path / "m.gguf", 0)
    with pytest.raises(ValueError, match=rf"m\.gguf: tensor blk\.0\.x\.weight has type {kind.name}"):
        gguf_tensors.check_types([tensor])
