# SPDX-License-Identifier: BSD-3-Clause
"""The emulator does what CUDA does, and notices what CUDA leaves undefined."""

from fractions import Fraction

import pytest
import torch

from emulator import ORDERS
from emulator.probe import ProbeParams, library

INT = torch.int32
ONE_OF_EACH_ORDER = [order for order in ORDERS if order != "changing"]


def run(kernel, inputs=None, out=None, n=0, *, order="changing", **launch):
    """Run a probe kernel; returns its output."""
    out = torch.zeros(256, dtype=INT) if out is None else out
    inputs = torch.arange(64, dtype=INT) if inputs is None else inputs
    library().set_order(order)
    library().launch(kernel, ProbeParams(inputs.data_ptr(), out.data_ptr(), n), **launch)
    return out


def each(kernel, inputs, out):
    """Run a probe kernel with one thread for each row of `out`."""
    return run(kernel, inputs, out, len(out), grid=(-(-len(out) // 256), 1, 1), threads=256)


# ---- intrinsics


def test_half_to_float_is_exact():
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    got = each("half_to_float", halves, torch.empty(65536))
    assert torch.equal(got.nan_to_num(7e9), halves.float().nan_to_num(7e9))
    assert torch.equal(got.signbit()[~halves.isnan()], halves.signbit()[~halves.isnan()])


def test_float_to_half_rounds_to_nearest_even():
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()  # all finite ones, ascending
    ties = (halves[:-1] + halves[1:]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(torch.inf)), halves])
    more = torch.randn(10000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 10000)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65519.99, 65520.0, 1e-45])
    x = torch.cat([near, -near, more, special])
    got = each("float_to_half", x, torch.empty(len(x), dtype=torch.float16))
    assert torch.equal(got.view(torch.int16), x.half().view(torch.int16))
    assert each("float_to_half", torch.tensor([torch.nan]), torch.zeros(1, dtype=torch.float16)).isnan().all()


def test_half_fma_rounds_once():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 65536, (6000, 3), generator=generator).to(torch.int16)
    # c close to -a * b and products far below c: where rounding twice goes wrong
    special = torch.tensor([[1.0009765625, 1.0009765625, 2.0**-24], [2048.0, 1.0009765625, 2.0**-24]])
    x = torch.cat([bits.view(torch.float16), special.half(), -special.half()])
    x = x[x.isfinite().all(1)]
    got = each("half_fma", x, torch.empty(len(x), dtype=torch.float16))
    for (a, b, c), result in zip(x.double().tolist(), got.double().tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if abs(exact) >= 65520:
            assert result == (torch.inf if exact > 0 else -torch.inf)
            continue
        tensor = torch.tensor(result, dtype=torch.float16)
        below = tensor.nextafter(torch.tensor(-torch.inf, dtype=torch.float16)).item()
        above = tensor.nextafter(torch.tensor(torch.inf, dtype=torch.float16)).item()
        error = abs(exact - Fraction(result))
        even = tensor.view(torch.int16).item() % 2 == 0
        for neighbour in (below, above):
            if abs(neighbour) != torch.inf:
                other = abs(exact - Fraction(neighbour))
                assert error < other or (error == other and even), (a, b, c, result)


def test_integer_intrinsics_match_their_definitions():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (500, 3), generator=generator).to(INT)
    x = torch.cat([x, torch.tensor([[0, 0, 0], [-1, -1, -1], [-(2**31), 127, 2**31 - 1]], dtype=INT)])
    got = each("integers", x, torch.empty(len(x), 8, dtype=INT))

    def signed(v):
        return (v + 2**31) % 2**32 - 2**31

    for (a, b, c), row in zip(x.tolist(), got.tolist(), strict=True):
        ua, ub, uc = a % 2**32, b % 2**32, c % 2**32
        bytes_a, bytes_b = ua.to_bytes(4, "little"), ub.to_bytes(4, "little")
        signed_bytes = [[v - 256 if v > 127 else v for v in part] for part in (bytes_a, bytes_b)]
        both = bytes_a + bytes_b
        picked = [uc >> (4 * i) & 15 for i in range(4)]
        permuted = bytes((255 if both[s & 7] > 127 else 0) if s & 8 else both[s] for s in picked)
        wide, shift = ub << 32 | ua, uc & 31
        want = [
            signed(c + sum(p * q for p, q in zip(*signed_bytes, strict=True))),
            signed(uc + sum(p * q for p, q in zip(bytes_a, bytes_b, strict=True))),
            signed(int.from_bytes(permuted, "little")),
            signed((wide << shift >> 32) % 2**32),
            signed((wide >> shift) % 2**32),
            ua.bit_count(),
            32 - ua.bit_length(),
            signed(int(f"{ua:032b}"[::-1], 2)),
        ]
        assert row == want, (a, b, c)


# ---- threads together


@pytest.mark.parametrize("order", ONE_OF_EACH_ORDER)
def test_shuffles_read_the_lanes_that_cuda_reads(order):
    got = run("shuffles", out=torch.full((6, 64), -1, dtype=INT), order=order, threads=64).tolist()
    for t in range(64):
        warp, lane = t // 32 * 32, t % 32
        want = [
            warp + 5,
            t // 8 * 8 + 3,
            t - 2 if lane % 8 >= 2 else t,
            t + 7 if lane % 16 < 9 else t,
            warp + (lane ^ 6),
            t if lane < 16 else t - 16,
        ]
        assert [row[t] for row in got] == [10 * v for v in want], t


@pytest.mark.parametrize("order", ONE_OF_EACH_ORDER)
def test_votes_count_every_thread(order):
    got = run("votes", out=torch.full((7, 64), -1, dtype=INT), order=order, threads=64)
    odd = 0xAAAAAAAA - 2**32
    for t in range(64):
        match = sum(1 << lane for lane in range(t % 4, 32, 4))
        want = [odd, int(t >= 32), int(t < 32), match - 2**32 if match >= 2**31 else match, 32, 0, 1]
        assert got[:, t].tolist() == want, t


def test_parts_of_a_warp_shuffle_apart():
    assert run("half_warp_shuffle")[:32].tolist() == [*range(15, -1, -1), *range(31, 15, -1)]


def test_atomics_lose_nothing():
    values = torch.randint(0, 16, (1000,), generator=torch.Generator().manual_seed(0)).to(INT)
    got = run("histogram", values, torch.zeros(16, dtype=INT), 1000, grid=(4, 1, 1), threads=256)
    assert got.tolist() == values.bincount(minlength=16).tolist()


@pytest.mark.parametrize("order", ONE_OF_EACH_ORDER)
def test_barriers_make_shared_memory_visible(order):
    assert run("reverse", order=order, threads=64)[:64].tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize("order", ONE_OF_EACH_ORDER)
def test_a_missing_barrier_changes_the_result(order):
    assert run("reverse_without_barrier", order=order, threads=64)[:64].tolist() != list(range(63, -1, -1))


def test_shared_memory_is_poisoned_before_every_block():
    got = run("unwritten_shared", out=torch.zeros(64, dtype=INT), grid=(3, 1, 1), threads=64, shared_bytes=256)
    assert (got == -1).all()


# ---- mistakes are named


@pytest.mark.parametrize(
    ("kernel", "launch", "message"),
    [
        ("barrier_after_exit", {"threads": 64}, r"block \(0, 0, 0\).*waits at __syncthreads in .*thread 33 has ended"),
        ("barriers_apart", {"threads": 64}, r"thread 0 waits at __syncthreads in .*:\d+, thread 32 waits at __sync"),
        ("shuffle_without_lane", {}, r"waits at __shfl_xor_sync in .*thread 7 of its mask has ended"),
        ("shuffle_against_barrier", {}, r"waits at __syncwarp in .*thread 9 of its mask waits at __syncthreads"),
        ("shuffle_from_outside", {}, r"__shfl_sync reads lane 20, which is not in its mask"),
        ("lane_outside_mask", {}, r"thread \d+: __syncwarp with mask 000000ff, which leaves out this lane"),
        ("misaligned_load", {}, r"thread 1: load_stream: address 0x\w+ is not a multiple of 16"),
        ("beyond_dynamic_shared", {"shared_bytes": 32, "n": 1}, r"wrote beyond its 32 bytes of dynamic shared memory"),
        ("shuffles", {"threads": 65}, r"launch with threads a block = 65, wanted 1 to 64"),
        ("shuffles", {"grid": (1, 65536, 1)}, r"launch with grid\.y = 65536, wanted 1 to 65535"),
        ("shuffles", {"shared_bytes": 98305}, r"bytes of shared memory"),
        ("no_such_kernel", {}, r"there is no kernel no_such_kernel"),
    ],
)
def test_mistakes_stop_the_launch(kernel, launch, message):
    with pytest.raises(RuntimeError, match=message):
        run(kernel, out=torch.zeros(512, dtype=INT), order="forward", **launch)
    assert run("reverse", threads=64)[0] == 63  # and the next launch is sound
