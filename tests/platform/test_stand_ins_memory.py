# SPDX-License-Identifier: BSD-3-Clause
"""Operators that alias, view and copy memory."""

import gc
import weakref

import pytest
import torch

from vllm_superl8.platform import stand_ins
from vllm_superl8.platform.stand_ins import core

stand_ins.install("cpu")
from vllm import _custom_ops as ops  # noqa: E402  (the stand-ins come first)


def test_swap_blocks_copies_pages():
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)
    ops.swap_blocks(source[10:], target, 10, torch.tensor([[0, 5], [2, 1]]))
    want = torch.zeros(60, dtype=torch.uint8)
    want[50:60], want[10:20] = source[10:20], source[30:40]
    assert torch.equal(target, want)


def test_swap_blocks_batch_copies_by_address():
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    addresses = [torch.tensor([tensor.data_ptr() + i for i in (0, 20)]) for tensor in (source, target)]
    ops.swap_blocks_batch(*addresses, torch.tensor([5, 7]))
    assert torch.equal(target, torch.where((source < 5) | ((source >= 20) & (source < 27)), source, 0))


def test_weak_ref_tensor_shares_memory_and_owns_none():
    storage_owner = torch.arange(24.0)
    x = storage_owner[4:].view(4, 5).T
    alias = core._weak_ref_tensor(x)
    assert torch.equal(alias, x) and alias.stride() == x.stride() and alias.data_ptr() == x.data_ptr()
    x[0, 0] = 99
    assert alias[0, 0] == 99
    reference = weakref.ref(storage_owner)
    del storage_owner, x
    gc.collect()
    assert reference() is None


def test_a_view_keeps_alive_what_it_is_made_of():
    """As the GPU view of pinned memory does, here with both on the CPU."""
    source = torch.arange(10.0)
    reference = weakref.ref(source)
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.data = core._keeping_alias(source, source.untyped_storage().data_ptr(), source.device)
    del source
    gc.collect()
    assert reference() is not None and parameter[9] == 9
    del parameter
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
def test_views_of_pinned_memory_are_seen_by_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    stand_ins.install("cuda")
    pinned = torch.arange(10.0).pin_memory()
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(pinned[2:])
    assert view.is_cuda and view.tolist() == list(range(2, 10))
    pinned += 1
    view *= 2
    torch.cuda.synchronize()
    assert pinned.tolist() == [1, 2, *(2 * i for i in range(3, 11))]
    loose = torch.ops._C.get_cuda_view_from_cpu_tensor(torch.arange(3))
    assert loose.is_cuda and loose.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_weak_references_work_inside_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    stand_ins.install("cuda")
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alias = torch.ops._C.weak_ref_tensor(x * 3)
    graph.replay()
    torch.cuda.synchronize()
    assert alias.tolist() == [3.0] * 8


@pytest.mark.gpu
def test_pages_move_between_host_and_gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from vllm_superl8.platform.stand_ins import cache

    on_gpu, on_host = torch.arange(1000, device="cuda"), torch.zeros(1000, dtype=torch.int64).pin_memory()
    cache._copy_on_stream(on_gpu[10:].data_ptr(), on_host.data_ptr(), 800)
    torch.cuda.synchronize()
    assert on_host[:100].tolist() == list(range(10, 110)) and not on_host[100:].any()
    cache._copy_on_stream(on_host.data_ptr(), on_gpu.data_ptr(), 80)
    torch.cuda.synchronize()
    assert on_gpu[:11].tolist() == [*range(10, 20), 10]
