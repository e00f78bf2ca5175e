# SPDX-License-Identifier: BSD-3-Clause
"""StoredMatrix: in blocks for those who ask, a plain tensor for all others."""

import pytest
import torch
from blocks import stored

from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.checkpoint.gguf_tensors import decode
from vllm_superl8.formats.layout import LAYOUTS


def matrix(format="q4_k", n=6, k=512, dtype=torch.bfloat16):
    return StoredMatrix(torch.from_numpy(stored(format, n, k)), LAYOUTS[format], dtype)


def test_stored_matrix_looks_like_its_values():
    m = matrix()
    values = decode(m.blocks, "Q4_K", torch.bfloat16)
    assert (m.shape, m.dtype, m.numel()) == (values.shape, values.dtype, values.numel())
    target = torch.zeros(6, 512, dtype=torch.bfloat16)
    target.copy_(m)
    assert torch.equal(target, values) and values.abs().max() > 0
    for got, want in ((m * 2, values * 2), (m.float(), values.float()), (m.narrow(1, 3, 70), values.narrow(1, 3, 70))):
        assert type(got) is torch.Tensor and torch.equal(got, want)
    assert torch.equal(
        torch.nn.functional.linear(torch.ones(1, 512).bfloat16(), m), torch.ones(1, 512).bfloat16() @ values.T
    )


def test_rows_of_a_stored_matrix_stay_in_blocks():
    m = matrix()
    for part in (m.narrow(0, 2, 3), m[2:5], m.data[2:5], m.to(torch.bfloat16)[2:5]):
        assert isinstance(part, StoredMatrix)
        assert torch.equal(part.blocks, m.blocks[2:5]) and torch.equal(part.values(), m.values()[2:5])


def test_columns_of_a_stored_matrix_are_whole_blocks():
    m = matrix()
    assert torch.equal(m.columns(256, 256).values(), m.values()[:, 256:])
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 columns that cannot be cut; take a smaller"):
        m.columns(0, 128)
