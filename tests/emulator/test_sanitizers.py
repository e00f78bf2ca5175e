# SPDX-License-Identifier: BSD-3-Clause
"""AddressSanitizer and UBSan see what kernels do, and find nothing in ours."""

import pytest

import emulator
from emulator import probe
from emulator.sanitized import run_sanitized


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
    probe.build(sanitize=True)
    arguments = [str(emulator.HERE / "probe.py"), kernel, str(threads), str(shared_bytes)]
    broken = run_sanitized([*arguments, str(n)], timeout_s=60)
    assert broken.returncode != 0
    assert finding in broken.stdout
    assert "probe_kernels.cu" in broken.stdout  # the report names the source line
    if n:  # one less is within bounds
        sound = run_sanitized([*arguments, str(n - 1)], timeout_s=60)
        assert sound.returncode == 0, sound.stdout
        assert "ran to the end" in sound.stdout


def test_kernels_are_clean_under_sanitizers():
    """Every seventh kernel test, which is some of every kernel's: all of them take a quarter of an hour."""
    emulator.build(emulator.builder().images(), sanitize=True)
    done = run_sanitized(
        # --capture=sys leaves the sanitizer's own report alone
        ["-m", "pytest", "-v", "-x", "--capture=sys", "--every=7", "tests/ops", "-m", "not gpu and not slow"],
        timeout_s=900,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
