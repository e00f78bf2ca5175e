# SPDX-License-Identifier: BSD-3-Clause
"""merge_attn_states: attention over two halves of the keys, joined, is attention over all of them."""

import pytest
import torch

from vllm_superl8.ops import merge  # noqa: F401  registers the op
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INF = float("inf")


def attend(query, keys, values):
    """Output (tokens, heads, head_dim) and lse (heads, tokens), in float64."""
    scores = torch.einsum("thd,shd->hts", query.double(), keys.double())
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values.double()), scores.logsumexp(-1)


def halves(tokens, heads, head_dim, dtype, device):
    """Two attentions as the op takes them, and what they should join to."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, heads, head_dim, generator=generator)
    keys, values = (torch.randn(24, heads, head_dim, generator=generator) for _ in range(2))
    parts = [attend(query, keys[part], values[part] + 1) for part in (slice(0, 9), slice(9, 24))]
    given = [(out.to(device, dtype), lse.float().to(device)) for out, lse in parts]
    # the op's inputs are rounded already: join those
    total = torch.logaddexp(*(lse for _, lse in given)).double()
    shares = [(lse.double() - total).exp().T.unsqueeze(-1) for _, lse in given]
    want = sum(out.double() * share for (out, _), share in zip(given, shares, strict=True))
    assert relative_error(want, attend(query, keys, values + 1)[0]) < 0.02  # joining is attention over all keys
    return given, want, total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 8), (3, 3, 64), (5, 7, 40)])
def test_merge_attn_states_joins_two_attentions(kernels, tokens, heads, head_dim, dtype):
    (prefix, suffix), want, want_lse = halves(tokens, heads, head_dim, dtype, kernels.device)
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        out, lse = torch.empty_like(prefix[0]), torch.empty_like(prefix[1])
        run("merge_attn_states", out, lse, *prefix, *suffix)
        assert relative_error(out, want) < arithmetic_limit("merge_attn_states", dtype)
        assert relative_error(lse, want_lse) < arithmetic_limit("merge_attn_states", torch.float32)


def test_merge_attn_states_takes_what_attended_nothing(kernels):
    out, lse = (torch.empty(4, 1, 2, device=kernels.device), torch.empty(1, 4, device=kernels.device))
    nan = torch.full((1, 2), float("nan"), device=kernels.device)
    full = torch.tensor([[1.0, 2.0]], device=kernels.device)
    prefix = torch.stack([nan, full, nan, full])
    suffix = torch.stack([full, nan, nan, full])
    prefix_lse = torch.tensor([[INF, 3.0, -INF, 0.0]], device=kernels.device)
    suffix_lse = torch.tensor([[2.0, -INF, INF, 0.0]], device=kernels.device)
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        run("merge_attn_states", out, lse, prefix, prefix_lse, suffix, suffix_lse)
        assert out.tolist() == [[[1, 2]], [[1, 2]], [[0, 0]], [[1, 2]]]
        assert lse[0, :3].tolist() == [2, 3, -INF] and abs(lse[0, 3] - 0.6931472) < 1e-6


@pytest.mark.parametrize("with_prefix", [0, 2, 5])
def test_merge_attn_states_copies_tokens_without_a_prefix(kernels, with_prefix):
    (prefix, suffix), want, _ = halves(5, 2, 16, torch.float16, kernels.device)
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        out, lse = torch.empty_like(prefix[0]), torch.empty_like(prefix[1])
        run("merge_attn_states", out, lse, *prefix, *suffix, with_prefix)
        limit = arithmetic_limit("merge_attn_states", torch.float16)
        assert relative_error(out[:with_prefix], want[:with_prefix]) < limit
        assert torch.equal(out[with_prefix:], suffix[0][with_prefix:])
        assert torch.equal(lse[:, with_prefix:], suffix[1][:, with_prefix:])


def test_merge_attn_states_takes_strides_and_no_lse(kernels):
    (prefix, suffix), want, _ = halves(3, 4, 32, torch.float32, kernels.device)
    padded = torch.zeros(3, 4, 48, device=kernels.device)
    padded[..., :32] = prefix[0]
    transposed = suffix[1].T.contiguous().T
    out = torch.empty(4, 3, 32, device=kernels.device).transpose(0, 1)
    kernels.run("merge_attn_states", out, None, padded[..., :32], prefix[1], suffix[0], transposed)
    assert relative_error(out, want) < arithmetic_limit("merge_attn_states", torch.float32)


def test_merge_attn_states_refuses_what_does_not_fit(kernels):
    (prefix, suffix), _, _ = halves(3, 2, 8, torch.float16, kernels.device)
    with pytest.raises(ValueError, match=r"prefix is \(3, 2, 8\) torch.float16, out \(3, 2, 8\) torch.float32"):
        kernels.run("merge_attn_states", torch.empty(3, 2, 8), None, *prefix, *suffix)
    with pytest.raises(ValueError, match=r"suffix_lse is \(3, 2\)"):
        kernels.run("merge_attn_states", torch.empty(3, 2, 8).half(), None, *prefix, suffix[0], suffix[1].T)
