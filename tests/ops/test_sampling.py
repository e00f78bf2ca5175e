# SPDX-License-Identifier: BSD-3-Clause
"""greedy_argmax, apply_repetition_penalties and gumbel_argmax."""

import pytest
import torch

from vllm_superl8.ops import sampling
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def logits_of(rows, vocab, dtype, device, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(0, 5), (1, 1), (3, 31), (2, 33), (2, 1023), (2, 1024), (1, 1025), (2, 5000)]
)
def test_greedy_argmax_is_the_largest(kernels, rows, vocab, dtype):
    logits = logits_of(rows, vocab, dtype, kernels.device)
    if rows:
        logits[-1, -1] = 50.0  # the very last of a partial stride
    got = kernels.run("greedy_argmax", logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize(("at", "first"), [((7, 3000, 900), 7), ((2999, 3001), 2999), ((31, 32), 31)])
@pytest.mark.parametrize("value", [9.0, float("inf"), float("nan")])
def test_greedy_argmax_takes_the_first_of_equals_and_nan_before_all(kernels, at, first, value):
    logits = logits_of(2, 4000, torch.float32, kernels.device).clamp(-8, 8)
    logits[0, list(at)] = value
    if value != value:
        logits[0, first - 1] = float("inf")
    assert kernels.run("greedy_argmax", logits)[0] == first
    assert OPS["greedy_argmax"].reference(logits)[0] == first


def test_greedy_argmax_of_nothing_but_minus_infinity_is_the_first(kernels):
    logits = torch.full((2, 100), -float("inf"), device=kernels.device)
    assert kernels.run("greedy_argmax", logits).tolist() == [0, 0]


def test_greedy_argmax_takes_strided_rows_and_more_dimensions(kernels):
    logits = logits_of(6, 64, torch.float16, kernels.device).view(2, 3, 64)[..., 5:50]
    assert torch.equal(kernels.run("greedy_argmax", logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 33), (3, 1025)])
def test_penalties_divide_positive_and_multiply_negative_logits(kernels, rows, vocab, dtype):
    logits = logits_of(rows, vocab, dtype, kernels.device)
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(rows, vocab, generator=generator).lt(0.3).to(kernels.device) for _ in range(2)]
    penalties = torch.tensor([1.3, 1.0, 0.5][:rows], device=kernels.device)
    want = torch.tensor(
        [
            [(v / p if v > 0 else v * p) if seen else v for v, seen in zip(row, mask, strict=True)]
            for row, mask, p in zip(logits.tolist(), (masks[0] | masks[1]).tolist(), penalties.tolist(), strict=True)
        ]
    )
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        got = logits.clone()
        run("apply_repetition_penalties", got, *masks, penalties)
        assert relative_error(got, want) < arithmetic_limit("apply_repetition_penalties", dtype)
        untouched = ~(masks[0] | masks[1])
        assert torch.equal(got[untouched], logits[untouched])


def test_penalties_take_strided_rows(kernels):
    whole = logits_of(2, 64, torch.float32, kernels.device)
    logits, rest = whole[:, 8:40], whole[:, 40:].clone()
    mask = torch.ones(2, 32, dtype=torch.bool, device=kernels.device)
    want = torch.where(logits > 0, logits / 2, logits * 2)
    kernels.run("apply_repetition_penalties", logits, mask, ~mask, torch.full((2,), 2.0, device=kernels.device))
    assert torch.equal(logits, want) and torch.equal(whole[:, 40:], rest)


def test_penalties_refuse_logits_that_are_no_rows(kernels):
    with pytest.raises(ValueError, match=r"logits are \(4, 2\) with strides \(1, 4\)"):
        mask = torch.ones(4, 2, dtype=torch.bool)
        kernels.run("apply_repetition_penalties", torch.zeros(2, 4).T, mask, mask, torch.ones(4))


def test_gumbel_argmax_draws_with_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -float("inf"), 3.0, -2.0])
    draws = 100_000
    tokens = sampling.gumbel_argmax(logits.expand(draws, -1).contiguous(), torch.arange(draws))
    expected = logits.softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=6)
    assert counts[3] == 0
    possible = expected > 0
    chi_squared = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_squared < 22  # 4 degrees of freedom: 2 in 10000 good generators exceed it


def test_gumbel_argmax_noise_is_uncorrelated_between_neighbouring_tokens_and_seeds():
    seeds, tokens = torch.arange(400).unsqueeze(1), torch.arange(400)
    noise = sampling._gumbel(seeds, tokens).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.015 and abs(noise.var() - 1.64493) < 0.03
    noise = (noise - noise.mean()) / noise.std()
    for neighbour in (noise.roll(1, 0), noise.roll(1, 1), noise.T):
        assert abs((noise * neighbour).mean()) < 0.01  # 0.0025 is the standard deviation of independent noise


def test_gumbel_argmax_depends_on_seed_and_token_alone():
    logits = logits_of(5, 300, torch.float32, "cpu")
    seeds = torch.tensor([7, 8, 9, 7, 2**31 - 1])
    together = sampling.gumbel_argmax(logits, seeds)
    alone = [sampling.gumbel_argmax(logits[i : i + 1], seeds[i : i + 1]).item() for i in range(5)]
    assert together.tolist() == alone
    # what top-k or top-p removed changes no other token's noise
    kept = logits.clone()
    kept[:, 100:] = -float("inf")
    best = logits[:, :100] + sampling._gumbel(seeds.unsqueeze(1), torch.arange(100))
    assert torch.equal(sampling.gumbel_argmax(kept, seeds), best.argmax(-1))
