# SPDX-License-Identifier: BSD-3-Clause
"""AddressSanitizer and UBSan see what kernels do, and find nothing in ours."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import emulator
from emulator import probe
from emulator.sanitized import run_sanitized

PARTS = 13


@pytest.mark.parametrize(
    ("kernel", "threads", "shared_bytes", "n", "finding"),
    [
        ("beyond_dynamic_shared", 32, 32, 1, "AddressSanitizer: heap-buffer-overflow"),
        ("beyond_static_shared", 32, 0, 1, "AddressSanitizer: global-buffer-overflow"),
        ("beyond_global", 32, 0, 32, "AddressSanitizer: heap-buffer-overflow"),
        ("misaligned_pointer", 32, 0, 0, "misaligned address"),
        ("signed_overflow", 32, 0, 0, "signed integer overflow"),
    ],
)
def test_sanitizers_stop_a_broken_kernel(kernel, threads, shared_bytes, n, finding):
    library = probe.build(sanitize=True)
    arguments = [str(emulator.HERE / "probe.py"), kernel, str(threads), str(shared_bytes)]
    broken = run_sanitized([*arguments, str(n)], library, timeout_s=60)
    assert broken.returncode != 0
    assert finding in broken.stdout
    assert "probe_kernels.cu" in broken.stdout  # the report names the source line
    if n:  # one less is within bounds
        sound = run_sanitized([*arguments, str(n - 1)], library, timeout_s=60)
        assert sound.returncode == 0, sound.stdout
        assert "ran to the end" in sound.stdout


def test_kernels_are_clean_under_sanitizers():
    """A thirteenth of the kernel tests for every core (thirteen, so that no parameter of theirs is always left out)."""
    library = emulator.build(emulator.builder().images(), sanitize=True)
    processes = min(PARTS, len(os.sched_getaffinity(0)))

    def run_part(part):
        # --capture=sys leaves the sanitizer's own report alone
        options = ["-v", "-x", "--capture=sys", f"--part={part}/{PARTS}", "-m", "not gpu and not slow"]
        return run_sanitized(["-m", "pytest", *options, "tests/ops"], library, timeout_s=900)

    with ThreadPoolExecutor(processes) as pool:
        for done in pool.map(run_part, range(processes)):
            assert done.returncode == 0, done.stdout[-8000:]
            assert " passed" in done.stdout
