# SPDX-License-Identifier: BSD-3-Clause
"""superl8 tune: a card's rates are found, kept, read again, and decide."""

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from vllm_superl8.ops import linear, tuning
from vllm_superl8.tools import tune

import emulator

UNITS, DP4A_TOPS, HBM_GBPS = 68, 54.0, 800.0
MACS_A_US = DP4A_TOPS * 1e6 / 2 / UNITS


class Model:
    """A timer that knows rates and answers with what they give, as KernelTimer would."""

    units = UNITS

    def __init__(self, rates, fp16_tflops, gemv_rows=8):
        self.rates, self.fp16_tflops, self.gemv_rows = rates, fp16_tflops, gemv_rows

    def gemm_us(self, tile, m, n, k, grouped, k_split=None):
        known = next(t for t in tuning.SHIPPED.tiles(grouped) if t.name == tile)
        full, sparse = self.rates[tile, grouped]
        splits = math.ceil(k / (k_split or k))
        share = math.ceil(math.ceil(m / known.m) * math.ceil(n / known.n) * splits / UNITS)
        us = share * known.m * known.n * (k_split or k) / ((full if share >= known.blocks else sparse) * MACS_A_US)
        return us + (2.0 if k_split else 0.0)

    def gemv_us(self, m, n, k):
        return 0.0 if m <= self.gemv_rows else 1e9

    def fp16_us(self, m, n, k):
        return 2 * m * n * k / self.fp16_tflops / 1e6


RATES = {
    ("128x128", False): (0.9, 0.7), ("64x64", False): (0.8, 0.6), ("32x32", False): (0.7, 0.5),
    ("16x64", False): (0.5, 0.4), ("128x128", True): (0.6, 0.6), ("64x64", True): (0.55, 0.55),
    ("32x64", True): (0.45, 0.35),
}  # fmt: skip


def tuned(fp16_tflops=7.0, **options):
    return tune.tune(Model(RATES, fp16_tflops, **options), DP4A_TOPS, HBM_GBPS)


def test_tune_finds_the_rates_of_the_card():
    found = tuned(gemv_rows=5)
    for grouped in (False, True):
        for tile in found.tiles(grouped):
            full, sparse = RATES[tile.name, grouped]
            assert tile.full == pytest.approx(full) and tile.sparse == pytest.approx(sparse)
    assert found.macs_a_us == pytest.approx(MACS_A_US)
    assert found.bytes_a_us * UNITS == pytest.approx(HBM_GBPS * 1e3)
    assert found.sum_us == pytest.approx(2.0)
    assert found.gemv_most_rows == 5
    assert found.fp16_macs_a_us * UNITS * 2 / 1e6 == pytest.approx(7.0)


def test_tuned_rates_survive_a_file(tmp_path):
    found = tuned()
    path = tuning.save(found, "NVIDIA CMP 100-210", "580.65.06", "abc", tmp_path)
    assert path.name == "NVIDIA-CMP-100-210-580.65.06.json"
    assert vars(tuning.load("NVIDIA CMP 100-210", "580.65.06", "abc", tmp_path)) == vars(found)
    assert tuning.load("NVIDIA CMP 100-210", "580.95", "abc", tmp_path) is tuning.SHIPPED
    assert tuning.load("Tesla V100", "580.65.06", "abc", tmp_path) is tuning.SHIPPED


def test_a_file_of_other_kernels_is_not_used(tmp_path, caplog):
    tuning.save(tuned(), "card", "1", "abc", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert tuning.load("card", "1", "def", tmp_path) is tuning.SHIPPED
    assert "was measured with other kernels" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("per_row"), "KeyError: 'per_row'"),
        (lambda found: found["per_row"].pop(), "KeyError"),
        (lambda found: found["grouped"][0].update(full=0), "full is 0, wanted a number above 0"),
        (lambda found: found.update(macs_a_us="fast"), "macs_a_us is 'fast'"),
        (lambda found: found.update(sum_us=float("nan")), "sum_us is nan"),
        (lambda found: found.update(gemv_most_rows=9), "gemv_most_rows is 9, wanted 1 to 8"),
    ],
)
def test_a_damaged_file_is_told_and_not_used(tmp_path, caplog, change, message):
    path = tuning.save(tuned(), "card", "1", "abc", tmp_path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with caplog.at_level(logging.WARNING):
        assert tuning.load("card", "1", "abc", tmp_path) is tuning.SHIPPED
    assert message in caplog.text and "superl8 tune writes it anew" in caplog.text
    path.write_text("{")
    assert tuning.load("card", "1", "abc", tmp_path) is tuning.SHIPPED


def test_fp16_products_are_taken_only_where_they_were_measured_faster():
    throttled, healthy = tuned(fp16_tflops=7.0), tuned(fp16_tflops=100.0)
    for m, n, k in [(2048, 14336, 4096), (4096, 4096, 4096)]:
        for grouped in (False, True):
            assert linear.plan_for(m, n, k, grouped, UNITS, tuning=healthy) == linear.Plan(None)
            assert linear.plan_for(m, n, k, grouped, UNITS, tuning=throttled).tile is not None
            assert linear.plan_for(m, n, k, grouped, UNITS).tile is not None  # shipped: not measured
    assert linear.plan_for(64, 4096, 4096, False, UNITS, tuning=healthy).tile is not None


def test_plans_follow_the_rates():
    slow = replace(tuned(), per_row=tuple(replace(t, full=t.full / 9) if t.n == 128 else t for t in tuned().per_row))
    assert linear.plan_for(2048, 14336, 4096, False, UNITS, tuning=tuned()).tile == "128x128"
    assert linear.plan_for(2048, 14336, 4096, False, UNITS, tuning=slow).tile == "64x64"


def test_the_timer_calls_the_kernels():
    """In the emulator, on small sizes; every tile, split or not."""
    calls = []

    def time_us(given):
        calls.extend(given)
        return len([call() for call in given])

    timer = tune.KernelTimer(emulator.load(), torch.device("cpu"), 2, time_us, lambda _: 2)
    for grouped in (False, True):
        for tile in tuning.SHIPPED.tiles(grouped):
            assert timer.gemm_us(tile.name, 3, 8, 256, grouped) == 2
            if tile.may_split:
                assert timer.gemm_us(tile.name, 3, 8, 1024, grouped, 512) == 2
    assert timer.gemv_us(2, 8, 128) == 2
    assert timer.fp16_us(4, 8, 16) == 1
    assert "fp16 products" in tune.render(tuned(), UNITS)
    assert len(calls) == 2 * 12 + 2 + 1
