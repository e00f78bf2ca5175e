# SPDX-License-Identifier: BSD-3-Clause
"""Access to probe_kernels.cu. As a program it runs one of its kernels: probe.py KERNEL THREADS SHARED_BYTES N."""

import ctypes
import functools
import os
import sys
from pathlib import Path

import emulator


class ProbeParams(ctypes.Structure):
    """As in probe_kernels.cu."""

    _fields_ = [("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("n", ctypes.c_int)]


def build(sanitize: bool = False) -> Path:
    """Link probe_kernels.cu with the emulator; the library's path. sanitize as emulator.build() takes it."""
    image = emulator.builder().Image(emulator.HERE / "probe_kernels.cu", None)
    return emulator.build([image], module=False, sanitize=sanitize)


@functools.cache
def library() -> emulator.Library:
    given = os.environ.get("SUPERL8_EMULATOR_LIBRARY")
    return emulator.Library(Path(given) if given else build())


def main(kernel: str, threads: str, shared_bytes: str, n: str) -> None:
    """Run one kernel on 32 ints in and 32 ints out."""
    buffers = [(ctypes.c_int * 32)(), (ctypes.c_int * 32)()]
    params = ProbeParams(ctypes.addressof(buffers[0]), ctypes.addressof(buffers[1]), int(n))
    library().launch(kernel, params, threads=int(threads), shared_bytes=int(shared_bytes))
    print("ran to the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
