# SPDX-License-Identifier: BSD-3-Clause
"""Slots, page clearing and state moves in torch, against loops; and that every override fits vLLM's kernel."""

import inspect
import itertools

import pytest
import torch
from vllm.triton_utils import dispatcher

from vllm_superl8.platform.triton_overrides import overrides, worker


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_overrides_fit_the_kernels_of_vllm(device):
    """Each target exists, and our parameters are the kernel's, in its order."""
    for name, function in overrides(device).items():
        if "_eplb_map_and_record" in name:
            continue  # vLLM defines it where the platform is CUDA
        host, attribute = dispatcher._resolve_kernel(name)
        wanted = list(dispatcher._kernel_arg_names(vars(host).get(attribute) or getattr(host, attribute)))
        got = list(inspect.signature(function).parameters)
        assert got[: len(wanted)] == wanted, f"{name}: {got}"


@pytest.mark.parametrize(("ranks", "rank", "interleave"), [(1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 1, 4), (4, 2, 2)])
def test_slots_are_block_times_size_plus_offset(generator, ranks, rank, interleave):
    page, lengths, starts = 16, [3, 1, 40], [5, 130, 0]
    table = torch.randperm(60, generator=generator).int().view(4, 15)  # one row more than there are requests
    query_start_loc = ints([0, *itertools.accumulate(lengths)])
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    slots = torch.full((50,), 77)
    padded = torch.cat([positions, ints([10**6], torch.int64)])
    worker.compute_slot_mapping(
        44, 48, query_start_loc, padded, table, 15, slots, page, ranks, rank, interleave
    )  # fmt: skip
    want = []
    for request, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        for position in range(start, start + n):
            block, offset = divmod(position, page * ranks)
            # places of a virtual block go round the ranks, `interleave` at a time
            owner = offset // interleave % ranks
            local = offset // (interleave * ranks) * interleave + offset % interleave
            want.append(int(table[request, block]) * page + local if owner == rank else -1)
    assert slots.tolist() == want + [-1] * 4 + [77, 77]


def test_zeroing_clears_pages_and_nothing_else():
    memory = [torch.ones(40, dtype=torch.int32), torch.ones(30, dtype=torch.int32)]
    addresses = ints([memory[0].data_ptr(), memory[1].data_ptr() + 4], torch.int64)
    worker.zero_kv_blocks(addresses, ints([10, 7]), ints([10, 4]), ints([3, 1], torch.int64))
    want = [torch.ones(40, dtype=torch.int32), torch.ones(30, dtype=torch.int32)]
    for block in (3, 1):
        want[0][10 * block : 10 * block + 10] = 0
        want[1][1 + 7 * block : 1 + 7 * block + 4] = 0
    assert torch.equal(memory[0], want[0]) and torch.equal(memory[1], want[1])


def test_states_move_also_over_themselves():
    memory = torch.arange(100, dtype=torch.uint8)
    base = memory.data_ptr()
    worker.batch_memcpy(
        ints([base + 10, base + 90], torch.uint64), ints([base, base + 50], torch.uint64), ints([30, 5])
    )
    want = torch.arange(100, dtype=torch.uint8)
    want[:30] = torch.arange(10, 40)
    want[50:55] = torch.arange(90, 95)
    assert torch.equal(memory, want)
