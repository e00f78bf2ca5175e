# SPDX-License-Identifier: BSD-3-Clause
"""rotary_embedding."""

import pytest
import torch

from vllm_superl8.ops import rotary  # noqa: F401  registers the op
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# tokens, heads, kv heads, head_dim, rotary_dim, first rotated element
SHAPES = [(1, 1, 1, 2, 2, 0), (3, 4, 2, 64, 64, 0), (2, 9, 3, 64, 32, 0), (5, 3, 1, 80, 20, 0), (2, 2, 1, 96, 64, 32)]


def data(*shape, dtype, device, seed=0):
    """Normal values with mean 0.5 and every 16th column thirty times as large."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    x[..., ::16] *= 30
    return x.to(device, dtype)


def angles(positions, rotary_dim, dtype, device):
    turns = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([turns.cos(), turns.sin()], -1).to(device, dtype)


def loop(positions, x, cache, is_neox, offset, inverse):
    """The definition, pair by pair, in float64; x (tokens, heads, head_dim)."""
    x, half = x.double().clone(), cache.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            cosine, sine = cache[position, pair].double(), cache[position, half + pair].double()
            sine = -sine if inverse else sine
            i = offset + (pair if is_neox else 2 * pair)
            j = i + (half if is_neox else 1)
            a, b = x[token, :, i].clone(), x[token, :, j].clone()
            x[token, :, i] = a * cosine - b * sine
            x[token, :, j] = b * cosine + a * sine
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary_embedding_is_the_rotation(kernels, shape, dtype, is_neox, inverse):
    tokens, heads, kv_heads, head_dim, rotary_dim, offset = shape
    positions = (torch.arange(tokens) * 7 % 11).to(kernels.device)
    cache = angles(11, rotary_dim, torch.float32, kernels.device)
    query = data(tokens, heads * head_dim, dtype=dtype, device=kernels.device)
    key = data(tokens, kv_heads, head_dim, dtype=dtype, device=kernels.device, seed=1)
    wanted = [loop(positions, x.view(tokens, -1, head_dim), cache, is_neox, offset, inverse) for x in (query, key)]
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        q, k = query.clone(), key.clone()
        run("rotary_embedding", positions, q, k, head_dim, cache, is_neox, offset, inverse)
        for got, want in zip((q, k), wanted, strict=True):
            assert relative_error(got.view_as(want), want) < arithmetic_limit("rotary_embedding", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_takes_strided_rows_no_key_and_a_cache_of_the_query_type(kernels, dtype):
    positions = torch.tensor([4, 0, 9], device=kernels.device)
    cache = angles(10, 16, dtype, kernels.device)
    row = data(3, 96, dtype=dtype, device=kernels.device)
    query, rest = row[:, 32:64], row[:, :32].clone()
    want = loop(positions, query.reshape(3, 2, 16), cache, True, 0, False)
    kernels.run("rotary_embedding", positions, query, None, 16, cache, True)
    assert relative_error(query.reshape(3, 2, 16), want) < arithmetic_limit("rotary_embedding", dtype)
    assert torch.equal(row[:, :32], rest)


def test_rotary_embedding_takes_no_tokens(kernels):
    positions = torch.empty(0, dtype=torch.int64, device=kernels.device)
    query = torch.empty(0, 64, device=kernels.device)
    kernels.run("rotary_embedding", positions, query, query.clone(), 16, angles(4, 16, torch.float32, "cpu"), True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "got torch.int32 positions, wanted int64"),
        ({"query": torch.zeros(2, 30)}, r"\(2, 30\) .* is not 2 tokens of heads of 16"),
        ({"cache": torch.zeros(4, 32)}, "32 elements from 0 on do not fit 16"),
        ({"cache": torch.zeros(4, 16).half()}, "only the cache may differ, by float32"),
    ],
)
def test_rotary_embedding_refuses_what_does_not_fit(kernels, changes, message):
    given = {"positions": torch.zeros(2, dtype=torch.int64), "query": torch.zeros(2, 32), "cache": torch.zeros(4, 16)}
    given |= changes
    given = {name: tensor.to(kernels.device) for name, tensor in given.items()}
    with pytest.raises(ValueError, match=message):
        kernels.run("rotary_embedding", given["positions"], given["query"], None, 16, given["cache"], True)
