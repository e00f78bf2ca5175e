# SPDX-License-Identifier: BSD-3-Clause
"""block_embedding: kernel and reference give the values that gguf.quants gives, rounded once."""

import pytest
import torch
from blocks import FORMATS, weights

from vllm_superl8.formats.layout import LAYOUTS
from vllm_superl8.ops.registry import OPS


def run(kernels, ids, w, n, dtype=torch.float32):
    return kernels.run("block_embedding", ids.to(kernels.device), w.on(kernels.device), w.format, n, dtype).cpu()


@pytest.mark.parametrize("format", FORMATS)
def test_block_embedding_matches_the_oracle(kernels, format):
    n = 3 * max(128, LAYOUTS[format].values)
    w = weights(format, 11, n)
    ids = torch.tensor([[3, 10, 0], [3, -1, 11]])
    want = torch.cat((w.values.float(), torch.zeros(1, n)))[torch.where((ids >= 0) & (ids < 11), ids, 11)]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(run(kernels, ids, w, n, dtype), want.to(dtype))
    assert torch.equal(OPS["block_embedding"].reference(ids.int(), w.planes, format, n, torch.float32), want)
    assert want[0].abs().amax(-1).min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_block_embedding_takes_long_rows_and_narrow_ids(kernels, dtype):
    n = 32 * 130  # more units than threads
    w = weights("q8_0", 4, n)
    ids = torch.tensor([2, 0], dtype=torch.int32)
    assert torch.equal(run(kernels, ids, w, n, dtype), w.values.to(dtype)[[2, 0]])
    assert run(kernels, ids[:0], w, n, dtype).shape == (0, n)


def test_block_embedding_refuses_bad_arguments(kernels):
    w = weights("q8_0", 4, 64)
    with pytest.raises(TypeError, match=r"ids are torch\.float32"):
        run(kernels, torch.ones(2), w, 64)
    with pytest.raises(ValueError, match=r"q8_0: planes are .* for rows of 96"):
        run(kernels, torch.zeros(2, dtype=torch.int64), w, 96)


def test_block_embedding_fake_has_the_shape_of_the_result():
    w = weights("q4_0", 4, 64)
    given = (torch.zeros(2, 3, dtype=torch.int64), w.planes, "q4_0", 64, torch.bfloat16)
    real, fake = OPS["block_embedding"].reference(*given), OPS["block_embedding"].fake(*given)
    assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
