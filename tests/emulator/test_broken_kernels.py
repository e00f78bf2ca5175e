# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes put into the project's own kernels make their tests fail."""

import pytest
import torch

from vllm_superl8.ops import norm  # noqa: F401  registers the ops
from vllm_superl8.ops.registry import OPS

import emulator
from emulator.sanitized import run_sanitized
from tolerances import arithmetic_limit, relative_error

NORM = emulator.builder().CSRC / "pointwise" / "norm.cu"
DEVICE = emulator.builder().CSRC / "common" / "device.cuh"


def broken(folder, source, find, replace, count):
    """An image of rms_norm alone, from copies of its files; `source` has `find` (there `count` times) replaced."""
    (folder / "common").mkdir()
    for path, copy in ((NORM, folder / "norm.cu"), (DEVICE, folder / "common" / "device.cuh")):
        text = path.read_text()
        if path == source:
            assert text.count(find) == count
            text = text.replace(find, replace)
        copy.write_text(text)
    return emulator.builder().Image(folder / "norm.cu", None)


def error_of(module, rows=3, n=512):
    """relative_error of rms_norm."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
    got = OPS["rms_norm"].kernel(module, x, None, 1e-6)
    return relative_error(got, OPS["rms_norm"].reference(x, None, 1e-6))


def test_the_sound_kernel_passes(tmp_path):
    image = broken(tmp_path, None, "", "", 0)
    assert error_of(emulator.load_from(emulator.build([image]))) < arithmetic_limit("rms_norm", torch.float32)


@pytest.mark.parametrize(
    ("source", "find", "replace", "count"),
    [
        (NORM, "i < p.n;", "i < p.n - 1;", 2),  # a loop bound off by one
        (DEVICE, "    if (lane == 0) scratch[warp] = v;\n    __syncthreads();\n",
         "    if (lane == 0) scratch[warp] = v;\n", 1),  # no barrier between writing and reading
        (DEVICE, "s = WARP / 2; s;", "s = WARP / 2; s > 1;", 3),  # a reduction that stops early
    ],
    ids=["loop_bound", "missing_barrier", "short_reduction"],
)  # fmt: skip
def test_a_broken_kernel_fails_its_limit(tmp_path, source, find, replace, count):
    module = emulator.load_from(emulator.build([broken(tmp_path, source, find, replace, count)]))
    assert not error_of(module) < arithmetic_limit("rms_norm", torch.float32)


def test_an_overrun_stops_under_the_sanitizer(tmp_path):
    library = emulator.build([broken(tmp_path, NORM, "i < p.n;", "i <= p.n;", 2)], sanitize=True)
    script = (
        "import emulator, numpy, pathlib\n"
        f"module = emulator.load_from(pathlib.Path({str(library)!r}))\n"
        "x, out = numpy.ones((2, 64), numpy.float32), numpy.ones((2, 64), numpy.float32)\n"
        "module.rms_norm('fp32', out.ctypes.data, x.ctypes.data, 0, 0, 2, 64, 64, 1e-6, 0.0, 0)\n"
    )
    done = run_sanitized(["-c", script], library, timeout_s=60)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stdout
    assert "norm.cu" in done.stdout
