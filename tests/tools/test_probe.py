# SPDX-License-Identifier: BSD-3-Clause
"""The probes do the work that their rates are computed from: their results have closed forms."""

import functools
import operator

import pytest
import torch

from vllm_superl8.tools import measure

CHAINS = 16


def signed_byte_sum(value: int) -> int:
    return sum(value.to_bytes(4, "little")[i] - 256 * (value.to_bytes(4, "little")[i] > 127) for i in range(4))


@pytest.mark.parametrize(("blocks", "steps"), [(1, 1), (2, 7)])
def test_probe_dp4a_does_every_step(kernels, blocks, steps):
    out = torch.full((blocks * measure.PROBE_THREADS,), -1, dtype=torch.int32, device=kernels.device)
    kernels.module.probe_dp4a(out.data_ptr(), blocks, steps, 0)
    wanted = [
        sum(chain + steps * signed_byte_sum(thread + chain) for chain in range(CHAINS)) for thread in range(out.numel())
    ]
    assert out.tolist() == wanted


def test_probe_dp4a_counts_its_operations():
    assert measure.DP4A_OPERATIONS_PER_STEP == CHAINS * 4 * 2


@pytest.mark.parametrize("num_words", [0, 4, 1020, 4 * 256 * 4 - 4, 4 * 256 * 4, 4 * 256 * 4 + 4, 20_000])
@pytest.mark.parametrize("blocks", [1, 3])
def test_probe_read_reads_every_word_once(kernels, num_words, blocks):
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(-(2**31), 2**31, (num_words,), dtype=torch.int32, generator=generator)
    on_device = words.to(kernels.device)
    out = torch.full((blocks * measure.PROBE_THREADS,), -1, dtype=torch.int32, device=kernels.device)
    kernels.module.probe_read(out.data_ptr(), on_device.data_ptr(), num_words, blocks, 0)
    xor = functools.partial(functools.reduce, operator.xor)
    assert xor(out.tolist(), 0) == xor(words.tolist(), 0)


def test_probe_read_refuses_a_ragged_end(kernels):
    with pytest.raises(ValueError, match="3 words"):
        kernels.module.probe_read(0, 0, 3, 1, 0)


def test_probe_dp4a_refuses_sums_that_overflow(kernels):
    with pytest.raises(ValueError, match="wanted 1 to 2\\^16"):
        kernels.module.probe_dp4a(0, 1, 1 << 20, 0)


@pytest.mark.gpu
def test_ceilings_are_those_of_a_graphics_card():
    found = measure.ceilings()
    assert 5 < found.dp4a_tops < 2000
    assert 100 < found.hbm_gbps < 20_000


@pytest.mark.gpu
def test_time_us_follows_the_work():
    small, large = (torch.zeros(size << 20, device="cuda") for size in (16, 256))
    ratio = measure.time_us([lambda: large.add_(1)]) / measure.time_us([lambda: small.add_(1)])
    assert 4 < ratio < 64
