# SPDX-License-Identifier: BSD-3-Clause
"""The limits themselves: each rejects every fault, and leaves room above what was measured."""

import pytest
import torch

from faults import FAULTS, nibbles_swapped
from tolerances import ARITHMETIC, relative_error

LIMITS = [(op, dtype, limit) for op, limits in ARITHMETIC.items() for dtype, limit in limits.items()]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("op", "dtype", "limit"), LIMITS)
def test_arithmetic_limits_reject_faults(op, dtype, limit, fault):
    want = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert relative_error(want, want) < limit.limit
    assert not relative_error(FAULTS[fault](want), want) < limit.limit


@pytest.mark.parametrize(("op", "dtype", "limit"), LIMITS)
def test_limits_leave_room_but_not_much(op, dtype, limit):
    assert limit.measured < limit.limit <= max(10 * limit.measured, 1e-6)


def test_relative_error_refuses_a_reference_that_proves_nothing():
    want = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    with pytest.raises(AssertionError, match="zero or not finite"):
        relative_error(want, want)
    with pytest.raises(AssertionError, match="got shape"):
        relative_error(want[:1], want)


def test_swapped_nibbles_are_other_codes():
    codes = torch.tensor([0x12, 0xF0, 0x33], dtype=torch.uint8)
    assert nibbles_swapped(codes).tolist() == [0x21, 0x0F, 0x33]
