# SPDX-License-Identifier: BSD-3-Clause
"""topk_routing, against loops over tokens and experts."""

import math

import pytest
import torch

from vllm_superl8.ops import routing
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def softmax(row):
    powers = [math.exp(v - max(row)) for v in row]
    return [power / sum(powers) for power in powers]


SCORES = {
    "none": lambda row: row,
    "softmax": softmax,
    "sigmoid": lambda row: [1 / (1 + math.exp(-v)) for v in row],
    "sqrt_softplus": lambda row: [math.sqrt(math.log1p(math.exp(v))) for v in row],
}


def best(values, count):
    """Numbers of the count largest values, largest first, the lower number of equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def route(row, topk, scoring, renormalize, scale, bias, groups, topk_group):
    """Experts and weights of one token."""
    scores = SCORES[scoring](row)
    ranks = [score + b for score, b in zip(scores, bias or [0.0] * len(row), strict=True)]
    size = len(row) // groups
    deciding = 2 if bias and size > 1 else 1
    group_ranks = [sum(sorted(ranks[g * size : (g + 1) * size])[-deciding:]) for g in range(groups)]
    kept = set(best(group_ranks, topk_group)) if groups > 1 else {0}
    ranks = [rank if groups == 1 or i // size in kept else -math.inf for i, rank in enumerate(ranks)]
    chosen = best(ranks, topk)
    weights = [scores[expert] for expert in chosen]
    total = sum(weights) if renormalize else 1
    return chosen, [weight * scale / total for weight in weights]


def outputs(tokens, topk, device, dtype=torch.int32):
    return (
        torch.empty(tokens, topk, device=device),
        torch.empty(tokens, topk, dtype=dtype, device=device),
        torch.empty(tokens, topk, dtype=torch.int32, device=device),
    )


def both(kernels, outs, *args, **kwargs):
    """Outputs of the kernel and of the reference."""
    for run in (kernels.run, lambda op, *args, **kwargs: OPS[op].reference(*args, **kwargs)):
        own = [torch.empty_like(out) for out in outs]
        run("topk_routing", *own, *args, **kwargs)
        yield own


# tokens, experts, topk, groups, topk_group: warps of 32 lanes, four a block
SHAPES = [(0, 8, 2, 1, 1), (1, 2, 1, 1, 1), (5, 31, 4, 1, 1), (4, 33, 33, 1, 1), (9, 128, 8, 1, 1), (3, 60, 4, 6, 2),
          (2, 256, 8, 8, 4), (2, 32, 3, 32, 5)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scoring", routing.SCORINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_topk_routing_chooses_the_best_experts(kernels, scoring, shape, has_bias, dtype):
    tokens, experts, topk, groups, topk_group = shape
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=generator) * 2
    logits = (logits.abs() if scoring == "none" else logits).to(kernels.device, dtype)
    bias = torch.randn(experts, generator=generator).to(kernels.device) if has_bias else None
    renormalize = experts % 2 == 0
    outs = outputs(tokens, topk, kernels.device)
    routed = [
        route(row, topk, scoring, renormalize, 2.5, bias.tolist() if has_bias else None, groups, topk_group)
        for row in logits.tolist()
    ]
    for weights, ids, token_expert in both(
        kernels, outs, logits, scoring, renormalize, 2.5, bias, None, groups, topk_group
    ):
        assert ids.tolist() == [chosen for chosen, _ in routed]
        want = torch.tensor([values for _, values in routed]).view(tokens, topk)
        assert relative_error(weights, want) < arithmetic_limit("topk_routing", torch.float32)
        assert token_expert.tolist() == [[token + tokens * j for j in range(topk)] for token in range(tokens)]


def test_topk_routing_takes_the_lower_of_equals_and_ranks_nan_last(kernels):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [float("nan")] * 3 + [0.5]], device=kernels.device)
    for _, ids, _ in both(kernels, outputs(2, 4, kernels.device), logits, "sigmoid", False):
        assert ids.tolist() == [[1, 2, 0, 3], [3, 0, 1, 2]]


def test_topk_routing_takes_minus_infinity(kernels):
    logits = torch.full((1, 40), -float("inf"), device=kernels.device)
    logits[0, [7, 35]] = torch.tensor([1.0, 2.0], device=kernels.device)
    for weights, ids, _ in both(kernels, outputs(1, 4, kernels.device), logits, "softmax", True):
        assert ids.tolist() == [[35, 7, 0, 1]]
        assert relative_error(weights, torch.tensor([[0.7310586, 0.2689414, 0, 0]])) < 1e-6


def test_topk_routing_gives_padding_no_expert(kernels):
    logits = torch.randn(3, 8, device=kernels.device)
    padding = torch.tensor([False, True, False], device=kernels.device)
    for weights, ids, _ in both(
        kernels, outputs(3, 2, kernels.device, torch.int64), logits, "softmax", True, 1.0, None, padding
    ):
        assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0, 0]
        assert (ids[::2] >= 0).all() and (weights[::2] > 0).all()


def test_topk_routing_reads_hashed_experts_and_lets_image_tokens_choose(kernels):
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).to(kernels.device)
    tokens_in = torch.tensor([0, 9, 14, 15], device=kernels.device)  # images: 10 to 14
    table = torch.stack([torch.arange(20) % 8, (torch.arange(20) + 3) % 8], 1).int().to(kernels.device)
    image_bias = torch.arange(8.0, device=kernels.device)
    extra = {"tokens_in": tokens_in, "hash_table": table, "image_bias": image_bias, "image_sentinel": 10}
    scores = torch.nn.functional.softplus(logits).sqrt()
    by_bias = (scores + image_bias)[2].topk(2).indices.tolist()
    wanted = [[0, 3], [1, 4], by_bias, [7, 2]]
    want = scores.gather(1, torch.tensor(wanted, device=kernels.device))
    for weights, ids, _ in both(kernels, outputs(4, 2, kernels.device), logits, "sqrt_softplus", False, **extra):
        assert ids.tolist() == wanted
        assert relative_error(weights, want) < arithmetic_limit("topk_routing", torch.float32)


def test_topk_routing_takes_strided_rows_and_no_third_output(kernels):
    whole = torch.randn(3, 64, device=kernels.device)
    weights, ids, _ = outputs(3, 2, kernels.device)
    kernels.run("topk_routing", weights, ids, None, whole[:, 8:40], "softmax", True)
    assert torch.equal(ids.long(), whole[:, 8:40].topk(2).indices)


def test_topk_routing_refuses_what_does_not_fit(kernels):
    logits = torch.zeros(2, 8, device=kernels.device)
    weights, ids, token_expert = outputs(2, 2, kernels.device)
    cases = {
        "no scoring called 'max'; known are none": (weights, ids, token_expert, logits, "max", True),
        r"ids are \(2, 2\) torch.int16": (weights, ids.short(), token_expert, logits, "softmax", True),
        r"weights are \(2, 2\) torch.float16": (weights.half(), ids, token_expert, logits, "softmax", True),
        "got top 9 of 8 experts": (*outputs(2, 9, kernels.device), logits, "softmax", True),
        "got 1 of 3 groups for 8 experts": (weights, ids, token_expert, logits, "softmax", True, 1.0, None, None, 3),
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=message):
            kernels.run("topk_routing", *arguments)
    with pytest.raises(ValueError, match="needs the token ids"):
        kernels.run("topk_routing", weights, ids, None, logits, "softmax", True, image_bias=torch.zeros(8))
