# SPDX-License-Identifier: BSD-3-Clause
"""Runs Python with AddressSanitizer loaded first, as the sanitized build of the emulator needs it."""

import os
import subprocess
import sys
from pathlib import Path

from emulator import HERE, builder


def run_sanitized(arguments: list[str], library: Path, timeout_s: float) -> subprocess.CompletedProcess:
    """Run `python *arguments` with the sanitizers in force; stdout and stderr come back together, as text.

    library  what emulator.load() loads there: built before, since a compiler would be slow under the sanitizer
    """
    compiler = builder().toolchain.gxx().split()
    # libstdc++ too: else the sanitizer finds no exceptions to intercept, and a launcher that raises ends the process
    libraries = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python's own memory is not freed at exit, and fibers have no fake stacks.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # every buffer gets its own guarded block
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "SUPERL8_EMULATOR_LIBRARY": str(library),
        "SUPERL8_EMULATOR_ORDER": "reverse",  # another order than the plain run has
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, text=True, timeout=timeout_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE.parents[1],
    )  # fmt: skip
