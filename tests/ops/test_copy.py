# SPDX-License-Identifier: BSD-3-Clause
"""Kernels that work on raw addresses: copy_bytes."""

import pytest
import torch


def copy(kernels, copies, sizes_dtype):
    """copies: (source, target, bytes) by address."""
    columns = [torch.tensor(column, device=kernels.device) for column in zip(*copies, strict=True)]
    columns[2] = columns[2].to(sizes_dtype)
    stream = torch.cuda.current_stream().cuda_stream if kernels.device.type == "cuda" else 0
    kernels.module.copy_bytes(
        *(column.data_ptr() for column in columns), len(copies), columns[2].element_size() == 8, stream
    )
    if kernels.device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("sizes_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, 3])  # 16 bytes at a time, and one
@pytest.mark.parametrize("size", [0, 16, 4096, 4112, 5000])
def test_copy_bytes_copies(kernels, size, offset, sizes_dtype):
    source = torch.randint(0, 256, (8192,), dtype=torch.uint8).to(kernels.device)
    target = torch.zeros_like(source)
    address, to = source.data_ptr() + offset, target.data_ptr() + 16
    copy(kernels, [(address, to, size), (source.data_ptr(), to + 6000, 7)], sizes_dtype)
    want = torch.zeros_like(source)
    want[16 : 16 + size] = source[offset : offset + size]
    want[6016:6023] = source[:7]
    assert torch.equal(target, want)


@pytest.mark.parametrize("distance", [1, 16, 48, 4096])
def test_copy_bytes_moves_down_over_itself(kernels, distance):
    memory = torch.randint(0, 256, (16384,), dtype=torch.uint8).to(kernels.device)
    want = memory.clone()
    want[:12288] = memory[distance : 12288 + distance]
    copy(kernels, [(memory.data_ptr() + distance, memory.data_ptr(), 12288)], torch.int64)
    assert torch.equal(memory, want)
