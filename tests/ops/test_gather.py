# SPDX-License-Identifier: BSD-3-Clause
"""embedding, embedding_int8 and vocab_parallel_embedding: copies and one product, so results are exact."""

import pytest
import torch

from vllm_superl8.ops import gather  # noqa: F401  registers the ops
from vllm_superl8.ops.registry import OPS

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IDS = [[3, 0, 9, 3, 10, -1, 2**40], [5], []]  # ids 10, -1 and 2**40 are outside a vocabulary of 10


def weight_of(dtype, n, device):
    return torch.randn(10, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 24, 33, 2056])
@pytest.mark.parametrize("ids", IDS)
def test_embedding_is_a_row_or_zeros(kernels, ids, n, dtype):
    weight = weight_of(dtype, n, kernels.device)
    got = kernels.run("embedding", torch.tensor(ids, dtype=torch.int64, device=kernels.device), weight)
    rows = [weight[i] if 0 <= i < 10 else torch.zeros_like(weight[0]) for i in ids]
    assert torch.equal(got, torch.stack(rows) if rows else weight[:0])


def test_embedding_takes_int32_ids_of_any_shape_and_unaligned_rows(kernels):
    whole = weight_of(torch.float16, 44, kernels.device).flatten()
    weight = whole[1:401].view(10, 40)  # the length of a row would allow 16-byte accesses, its address does not
    ids = torch.tensor([[1, 2, 3], [9, 8, 7]], dtype=torch.int32, device=kernels.device)
    assert torch.equal(kernels.run("embedding", ids, weight), weight[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 24, 33])
def test_embedding_int8_is_codes_times_scale(kernels, n, dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (10, n), generator=generator, dtype=torch.int8).to(kernels.device)
    scales = (torch.rand(10, 1, generator=generator) + 0.1).to(kernels.device)
    ids = torch.tensor(IDS[0], device=kernels.device)
    got = kernels.run("embedding_int8", ids, codes, scales, dtype)
    want = torch.stack([codes[i].float() * scales[i] if 0 <= i < 10 else torch.zeros(n).to(codes.device) for i in ids])
    assert torch.equal(got, want.to(dtype))
    assert torch.equal(OPS["embedding_int8"].reference(ids, codes, scales, dtype), want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_a_vocabulary_add_up(kernels, dtype):
    whole = weight_of(dtype, 16, kernels.device)  # words 0..5 in two shards, added words 6..9 likewise
    padding = torch.full((2, 16), 99.0).to(whole)
    ids = torch.tensor([0, 5, 2, 3, 6, 9, 7, 8, 1], device=kernels.device)
    total = 0
    for rank in (0, 1):
        first, added = 3 * rank, 6 + 2 * rank
        shard = torch.cat([whole[first : first + 3], padding, whole[added : added + 2]])
        out = torch.empty(9, 16, dtype=dtype, device=kernels.device)
        want = torch.empty_like(out)
        arguments = (ids, shard, first, first + 3, 2, added, added + 2)
        kernels.run("vocab_parallel_embedding", out, *arguments)
        OPS["vocab_parallel_embedding"].reference(want, *arguments)
        assert torch.equal(out, want)
        total = total + out
    assert torch.equal(total, whole[ids])


def test_embeddings_refuse_what_does_not_fit(kernels):
    weight = weight_of(torch.float16, 8, kernels.device)
    ids = torch.zeros(2, dtype=torch.int64, device=kernels.device)
    with pytest.raises(ValueError, match=r"ids are torch\.int16, wanted int32 or int64"):
        kernels.run("embedding", ids.short(), weight)
    with pytest.raises(ValueError, match="weight or out is not contiguous"):
        kernels.run("embedding", ids, weight.T)
    with pytest.raises(ValueError, match=r"scales are \(3, 1\)"):
        kernels.run("embedding_int8", ids, weight.to(torch.int8), torch.ones(3, 1), torch.float16)
    with pytest.raises(ValueError, match=r"out is \(2, 7\) torch.float16 for 2 ids"):
        kernels.run("vocab_parallel_embedding", torch.empty(2, 7).half(), ids, weight, 0, 10, 0, 0, 0)
