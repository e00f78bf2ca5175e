# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes put into the project's own kernels make their tests fail."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vllm_superl8.ops import norm  # noqa: F401  registers the ops
from vllm_superl8.ops.registry import OPS

import emulator
from emulator.sanitized import run_sanitized
from tolerances import arithmetic_limit, relative_error

CSRC = emulator.builder().CSRC
NORM, ROW, DEVICE = "pointwise/norm.cu", "pointwise/rms.cuh", "common/device.cuh"


@dataclass(frozen=True)
class Copies:
    """An image of rms_norm alone, from a folder of copies."""

    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / NORM

    @property
    def defines(self) -> list[str]:
        return [f"-iquote{self.folder}"]


def broken(folder, source, find, replace, count):
    """Copies in which `source` has `find` (there `count` times) replaced."""
    for name in ("common", "pointwise"):
        shutil.copytree(CSRC / name, folder / name)
    if source:
        text = (folder / source).read_text()
        assert text.count(find) == count
        (folder / source).write_text(text.replace(find, replace))
    return Copies(folder)


def error_of(module, rows=3, n=4096):
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
        (ROW, "i < EIGHT; i++) squares", "i < EIGHT - 1; i++) squares", 1),  # a loop bound off by one
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
    library = emulator.build([broken(tmp_path, NORM, "column < p.row.n", "column <= p.row.n", 1)], sanitize=True)
    script = (
        "import emulator, numpy, pathlib\n"
        f"module = emulator.load_from(pathlib.Path({str(library)!r}))\n"
        "x, out = numpy.ones((2, 64), numpy.float32), numpy.ones((2, 64), numpy.float32)\n"
        "module.rms_norm('fp32', out.ctypes.data, x.ctypes.data, 0, 0, False, 2, 64, 64, 1e-6, 0.0, 0)\n"
    )
    done = run_sanitized(["-c", script], library, timeout_s=60)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stdout
    assert "norm.cu" in done.stdout
