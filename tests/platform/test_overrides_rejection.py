# SPDX-License-Identifier: BSD-3-Clause
"""Rejection sampling in torch, against loops over requests and drafts."""

import itertools

import pytest
import torch

from vllm_superl8.platform.triton_overrides import rejection


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


VOCAB = 11
DRAFTED = [[2, 0, 3], [0, 0], [3, 3, 3, 1]]


def drafts_of(counts, generator):
    """Everything that the sampler knows of a batch with these numbers of drafts, and a mixture of requests."""
    batch, total, most = len(counts), sum(counts), max(counts)
    tokens = torch.randint(0, VOCAB, (total,), generator=generator, dtype=torch.int32)
    targets = torch.where(torch.rand(total, generator=generator) < 0.6, tokens, (tokens + 1) % VOCAB).long()
    tokens[torch.rand(total, generator=generator) < 0.15] = -1  # padding
    return {
        "counts": counts,
        "ends": ints(list(itertools.accumulate(counts))),
        "tokens": tokens,
        "targets": targets,
        "bonus": torch.randint(0, VOCAB, (batch, 1), generator=generator, dtype=torch.int32),
        "greedy": torch.rand(batch, generator=generator) < 0.5,
        "uniform": torch.rand(total, generator=generator, dtype=torch.float64),
        "rates": torch.rand(max(1, most), generator=generator),
        "draft_probs": torch.rand(total, VOCAB, generator=generator).softmax(-1),
        "target_probs": (torch.rand(total, VOCAB, generator=generator) * 3).softmax(-1),
        "recovered": torch.randint(0, VOCAB, (total,), generator=generator, dtype=torch.int32),
        "output": torch.full((batch, most + 1), -1, dtype=torch.int32),
    }


def accept(d, decide, rows):
    """Output of the rows (requests) that are to be written: tokens up to the first that decide() rejects."""
    output, place = d["output"].clone(), 0
    for request, count in enumerate(d["counts"]):
        written = []
        for step in range(count):
            accepted, token = decide(place + step, step)
            written.append(token)
            if not accepted:
                break
        else:
            written.append(int(d["bonus"][request]))
        if rows[request]:
            output[request, : len(written)] = ints(written)
        place += count
    return output


@pytest.mark.parametrize("counts", DRAFTED)
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_rejection_keeps_what_the_target_would_choose(counts, synthetic, all_greedy, seed):
    d = drafts_of(counts, torch.Generator().manual_seed(seed))

    def decide(place, step):
        token, target = int(d["tokens"][place]), int(d["targets"][place])
        if synthetic:
            accepted = token >= 0 and float(d["uniform"][place]) < float(d["rates"][step])
            return accepted, token if accepted else target
        return token == target, target

    want = accept(d, decide, [True] * len(counts) if all_greedy else d["greedy"].tolist())
    rejection.rejection_greedy_sample(
        d["output"], d["ends"], d["tokens"], d["targets"], d["bonus"], None if all_greedy else d["greedy"], max(counts),
        d["uniform"], d["rates"] if synthetic else None, synthetic,
    )  # fmt: skip
    assert torch.equal(d["output"], want)


@pytest.mark.parametrize("counts", DRAFTED)
@pytest.mark.parametrize("mode", ["probs", "no draft probs", "synthetic"])
@pytest.mark.parametrize("seed", range(5))
def test_random_rejection_keeps_drafts_by_their_ratio(counts, mode, seed):
    d = drafts_of(counts, torch.Generator().manual_seed(seed))
    if sum(counts) and mode == "probs":
        d["draft_probs"][0] = 0  # never accepted, and no division by zero

    def decide(place, step):
        token, uniform = int(d["tokens"][place]), float(d["uniform"][place])
        if token < 0:
            accepted = False
        elif mode == "synthetic":
            accepted = uniform < float(d["rates"][step])
        else:
            drafted = float(d["draft_probs"][place, token]) if mode == "probs" else 1.0
            accepted = drafted > 0 and float(d["target_probs"][place, token]) / drafted >= uniform
        return accepted, token if accepted else int(d["recovered"][place])

    want = accept(d, decide, (~d["greedy"]).tolist())
    rejection.rejection_random_sample(
        d["output"], d["ends"], d["tokens"], d["draft_probs"] if mode == "probs" else None, d["target_probs"],
        d["bonus"], d["recovered"], d["uniform"], d["greedy"], max(counts), VOCAB,
        d["rates"] if mode == "synthetic" else None, mode != "probs", mode == "synthetic",
    )  # fmt: skip
    assert torch.equal(d["output"], want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_expand_repeats_a_value_for_each_token(dtype):
    out = torch.full((5,), -9, dtype=dtype)
    rejection.expand(out, ints([7, 0, 8], dtype), ints([2, 2, 5]), 8, 1, 16)
    assert out.tolist() == [7, 7, 1, 1, 1]


@pytest.mark.parametrize("counts", DRAFTED)
@pytest.mark.parametrize("has_draft_probs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovered_tokens_are_drawn_from_what_remains(generator, counts, has_draft_probs, dtype):
    d = drafts_of(counts, generator)
    inv_q = torch.empty(len(counts), VOCAB, dtype=dtype).exponential_(generator=generator).reciprocal()
    want, place = [], 0
    for request, count in enumerate(counts):
        for step in range(place, place + count):
            scores = []
            for token in range(VOCAB):
                prob = float(d["target_probs"][step, token])
                if has_draft_probs:
                    prob = max(0.0, prob - float(d["draft_probs"][step, token]))
                elif token == int(d["tokens"][step]):
                    prob = 0.0
                scores.append(prob * float(inv_q[request, token]))
            want.append(scores.index(max(scores)))
        place += count
    out = torch.full_like(d["tokens"], -9)
    rejection.sample_recovered_tokens(
        out, d["ends"], d["tokens"], d["draft_probs"] if has_draft_probs else None, d["target_probs"], inv_q, VOCAB, 16,
        not has_draft_probs, dtype == torch.float64,
    )  # fmt: skip
    assert out.tolist() == want
