# SPDX-License-Identifier: BSD-3-Clause
"""Builds and loads the emulator: the project's .cu files compiled by g++ and run on the CPU.

``load()`` gives a module with the same functions as vllm_superl8._C, taking addresses of CPU memory. It is the very
object of the extension's launchers, linked with emulator.cpp in place of launch.cpp and CUDA. Objects go into the
build's cache, so that only what changed is compiled again.
"""

import ctypes
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import elf

HERE = Path(__file__).resolve().parent
ORDERS = {"changing": -1, "forward": 0, "reverse": 1, "shuffled": 2}

# -O0 because the unrolled kernels take minutes to optimise with all checks in them.
SANITIZE = [
    "-O0", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address", "-fno-sanitize-recover=all",
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
]  # fmt: skip
DEVICE = [
    "-O1", "-DDEVICE_HALF", "-DEMULATOR", "-fno-strict-aliasing", "-ffp-contract=off", "-fvisibility=hidden",
    "-fno-gnu-unique", "-Wall", "-Wno-unknown-pragmas",
]  # fmt: skip
RUNTIME = ["-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]


@functools.cache
def builder() -> ModuleType:
    """The project's build, csrc/build.py."""
    path = HERE.parents[1] / "csrc" / "build.py"
    spec = importlib.util.spec_from_file_location("superl8_build", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shared_variables(library: Path, objects: Iterable[Path]) -> list[tuple[int, int]]:
    """Offset and bytes of every static __shared__ variable of the device halves.

    Such a variable is a writable static inside a function: its mangled name starts with _ZZ. Device code has no others.
    """

    def local_statics(path):
        return [
            symbol
            for symbol in elf.symbols(path)
            if symbol.kind == elf.OBJECT and symbol.name.startswith("_ZZ") and symbol.section.flags & elf.WRITABLE
        ]

    names = {symbol.name for path in objects for symbol in local_statics(path)}
    return [(symbol.value, symbol.size) for symbol in local_statics(library) if symbol.name in names]


def build(images: Iterable, *, module: bool = True, sanitize: bool = False) -> Path:
    """Link device halves (images as csrc/build.py lists them) with the emulator; the library's path.

    module    with the launchers and Python bindings; without them only `Library` can use the result
    sanitize  with AddressSanitizer and UBSan; such a library loads in a process of sanitized.py only
    """
    make = builder()
    extra = SANITIZE if sanitize else []
    includes = [f"-I{path}" for path in (make.CSRC, HERE, make.generated_headers())]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        launchers = pool.submit(make.compile_module) if module else None
        runtime = pool.submit(
            make.toolchain.compile_object, HERE / "emulator.cpp", [*RUNTIME, *extra, *includes], sanitize
        )
        flags = [[*DEVICE, *extra, *includes, *(d for d in image.defines if d != "-DDEVICE_HALF")] for image in images]
        device = [
            pool.submit(make.toolchain.compile_object, image.source, own, sanitize)
            for image, own in zip(images, flags, strict=True)
        ]
        device_objects = [future.result() for future in device]
        objects = [runtime.result(), *device_objects, *([launchers.result()] if launchers else [])]

    def link(folder: Path) -> None:
        library = folder / "_C.so"
        command = [*make.toolchain.gxx().split(), "-shared", *extra, *map(str, objects), "-ldl", "-o", str(library)]
        make.toolchain.run(command, "the emulator")
        (folder / "shared.json").write_text(json.dumps(_shared_variables(library, device_objects)))

    return make.toolchain.cached("emulator-" + make.toolchain.digest(*map(str, objects), *extra)[:32], link) / "_C.so"


class Library:
    """A linked emulator, as far as its own controls go."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        variables = json.loads((path.parent / "shared.json").read_text())
        numbers = ctypes.c_uint64 * len(variables)
        offsets, sizes = numbers(*(v[0] for v in variables)), numbers(*(v[1] for v in variables))
        self._library.emulator_set_shared(len(variables), offsets, sizes)

    def launch(self, symbol: str, params: ctypes.Structure, grid=(1, 1, 1), threads: int = 32, shared_bytes: int = 0):
        """Run a kernel that has no launcher. Raises RuntimeError with what stopped it."""
        self._library.emulator_launch.restype = ctypes.c_char_p
        dimensions = (ctypes.c_uint * 3)(*grid)
        error = self._library.emulator_launch(
            symbol.encode(), dimensions, ctypes.c_uint(threads), ctypes.c_uint(shared_bytes), ctypes.byref(params)
        )
        if error is not None:
            raise RuntimeError(error.decode())

    def set_order(self, order: str = "changing", seed: int = 0) -> None:
        """In which order threads are resumed: one of ORDERS; seed also sets where "changing" starts."""
        self._library.emulator_set_order(ORDERS[order], seed)


def load_from(path: Path) -> ModuleType:
    """Import a library that build() linked. The module has its Library as `emulator`."""
    # A name of its own for each library: pybind11 gives the first module back for a name it has seen.
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.emulator = Library(path)
    return module


@functools.cache
def load() -> ModuleType:
    """The emulator with every kernel of the checkout, or the library that SUPERL8_EMULATOR_LIBRARY names."""
    given = os.environ.get("SUPERL8_EMULATOR_LIBRARY")
    return load_from(Path(given) if given else build(builder().images()))
