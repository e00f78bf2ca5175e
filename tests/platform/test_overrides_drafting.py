# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of draft models in torch, against loops."""

import itertools

import pytest
import torch

from vllm_superl8.platform.triton_overrides import drafting


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def test_eagle_step_goes_one_token_on(generator):
    table = torch.randperm(12, generator=generator).int().view(3, 4)
    positions, seq_lens = ints([6, 14, 15], torch.int64), ints([7, 15, 16])
    out_positions, slots = torch.full((3,), -9), torch.full((5,), -9)
    drafting.eagle_step_slot_mapping_metadata(positions, table, 4, seq_lens, out_positions, slots, 4, 16, 4, -1, 3)
    assert out_positions.tolist() == [7, 15, 0]  # the last is at its end: it starts over, unsaved
    assert slots.tolist() == [int(table[0, 1]) * 4 + 3, int(table[1, 3]) * 4 + 3, -1, -1, -1]
    assert seq_lens.tolist() == [8, 16, 1]


def test_eagle_inputs_end_at_the_last_valid_token():
    indices, rejected = torch.full((4,), -9, dtype=torch.int32), torch.full((4,), -9, dtype=torch.int32)
    # drafts 2, 0, 3; sampled and valid 1, 1, 4: two rejected, none drafted, none rejected
    drafting.eagle_prepare_inputs_padded(ints([2, 2, 5]), ints([1, 1, 4]), ints([0, 3, 10, 14]), indices, rejected, 3)
    assert indices.tolist() == [0, 9, 13, -9]
    assert rejected.tolist() == [2, 0, 0, -9]


def test_eagle_goes_on_from_the_last_valid_token():
    sampled = ints([[5, 6, -1], [7, -1, -1], [-1, -1, -1], [8, 9, 3], [4, 200, -1]])
    discarded = torch.tensor([False, False, False, True, False])
    following, counts = torch.full((5,), -9, dtype=torch.int32), torch.full((5,), -9, dtype=torch.int32)
    drafting.eagle_prepare_next_token_padded(
        sampled, discarded, ints([50, 51, 52, 53, 54]), following, counts, 100, 3, 5, 3, 4
    )
    assert following.tolist() == [6, 7, 52, 53, 4]
    assert counts.tolist() == [2, 1, 0, 0, 1]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("slots", [1, 4])
def test_eagle_inputs_expand_each_request(shift, slots):
    lengths, rejections, first = [4, 1, 3], [1, 0, 2], [10, 0, 30]
    starts = [0, *itertools.accumulate(lengths)]
    tokens = ints(list(range(100, 108)))
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(first, lengths, strict=True)])
    want = {"ids": [], "positions": [], "rejected": [], "masked": [], "new": [], "mapping": []}
    for request, (start, n, rejected) in enumerate(zip(starts, lengths, rejections, strict=False)):
        out = len(want["ids"])
        kept = tokens[start + shift : start + n - rejected].tolist()
        want["new"] += range(out + len(kept), out + len(kept) + slots)
        want["ids"] += [*kept, 500 + request, *[999] * (slots - 1), *[0] * rejected]
        want["positions"] += [first[request] + i for i in range(len(kept) + slots)] + [0] * rejected
        want["rejected"] += [False] * (len(kept) + slots) + [True] * rejected
        want["masked"] += [False] * (len(kept) + 1) + [True] * (slots - 1) + [False] * rejected
        want["mapping"] += range(out, out + n)
    total = len(want["ids"])
    got = {name: torch.full((total + 2,), -9) for name in ("ids", "positions")}
    got |= {name: torch.zeros(total + 2, dtype=torch.bool) for name in ("rejected", "masked")}
    got |= {"new": torch.full((3 * slots,), -9), "mapping": torch.full((8,), -9)}
    ends = ints([start + n - 1 - rejected for start, n, rejected in zip(starts, lengths, rejections, strict=False)])
    drafting.copy_and_expand_eagle_inputs(
        tokens, positions, ints([500, 501, 502]), got["ids"], got["positions"], got["rejected"], got["masked"],
        got["new"], got["mapping"], ints(starts), ends, 0, 999, 8, slots, shift, 16,
    )  # fmt: skip
    for name in ("ids", "positions", "rejected", "masked"):
        assert got[name][:total].tolist() == want[name], name
        assert got[name][total:].tolist() == [-9 if name in ("ids", "positions") else False] * 2
    assert got["new"].tolist() == want["new"]
    assert got["mapping"].tolist() == (want["mapping"] if shift else [-9] * 8)


@pytest.mark.parametrize("rejections", [None, [1, 0, 2]])
def test_dflash_queries_follow_the_context(generator, rejections):
    page, speculative = 4, 3
    lengths, first = [4, 1, 3], [5, 0, 9]
    starts = [0, *itertools.accumulate(lengths)]
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(first, lengths, strict=True)])
    table = torch.randperm(18, generator=generator).int().view(3, 6)
    want = {
        "ids": [],
        "context": positions.tolist(),
        "query": [],
        "context_slots": [],
        "query_slots": [],
        "sampled": [],
    }
    for request in range(3):
        slot = lambda p, request=request: int(table[request, p // page]) * page + p % page  # noqa: E731
        context = range(first[request], first[request] + lengths[request])
        last = context[-1] - (rejections[request] if rejections else 0)
        queries = range(last + 1, last + 2 + speculative)
        want["context_slots"] += map(slot, context)
        want["query_slots"] += map(slot, queries)
        want["sampled"] += range(len(want["query"]) + 1, len(want["query"]) + 1 + speculative)
        want["query"] += queries
        want["ids"] += [500 + request, *[999] * speculative]
    sizes = {"ids": 12, "context": 8, "query": 12, "context_slots": 8, "query_slots": 12, "sampled": 9}
    got = {name: torch.full((size,), -9) for name, size in sizes.items()}
    drafting.copy_and_expand_dflash_inputs(
        ints([500, 501, 502]), positions, got["ids"], got["context"], got["query"], got["context_slots"],
        got["query_slots"], got["sampled"], table, 6, ints(starts), 0 if rejections is None else ints(rejections), 999,
        page, 1 + speculative, speculative, 8, 16, rejections is not None,
    )  # fmt: skip
    assert {name: tensor.tolist() for name, tensor in got.items()} == want
