# SPDX-License-Identifier: BSD-3-Clause
"""Builds vllm_superl8._C: kernels by NVRTC, their launchers by g++, nothing but PyPI packages and g++ needed.

    python csrc/build.py        builds the extension into vllm_superl8/ of this checkout (what developers run)
    pip install .               the same through setup.py, in pip's build isolation

Each csrc/**/*.cu is compiled twice. Its device half becomes images: one, or one for each row of formats/layout.py
that lists the file's stem among its ops (then FORMAT is defined as the row's name). Its host half goes with all others
into module.cpp. Image and host objects are cached by the hash of everything that made them.

Environment:
    SUPERL8_ARCHS         architectures, default "sm_70 compute_70"; sm_XX is machine code, compute_XX is PTX that
                          newer cards compile when they load it. For the P40 add sm_61.
    SUPERL8_BUILD_CACHE   folder of the cache, default ~/.cache/superl8/build; entries unused for 30 days go
    SUPERL8_PURE_PYTHON   1 makes a wheel without the extension: every op runs its torch reference
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

CSRC = Path(__file__).resolve().parent
ROOT = CSRC.parent
LAYOUT = ROOT / "vllm_superl8" / "formats" / "layout.py"
DEFAULT_ARCHS = "sm_70 compute_70"
NO_SPILL_ARCH = "sm_70"

NVRTC = ("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
NVFATBIN = ("nvidia-nvfatbin-cu12", "nvidia/nvfatbin/lib/libnvfatbin.so.12")
CUDART = ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/lib/libcudart_static.a")
CUDA_INCLUDES = (
    ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include"),
    ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/include"),  # crt/
    ("nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include"),  # nv/target, which cuda_fp16.h includes
)


def load_file(name: str, path: Path) -> ModuleType:
    """Import a Python file that is in no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toolchain = load_file("superl8_toolchain", CSRC / "toolchain.py")
BuildError = toolchain.BuildError


@dataclass(frozen=True)
class Image:
    """What one NVRTC run makes: the kernels of a .cu file, for one format if the file takes formats."""

    source: Path
    format: str | None

    @property
    def name(self) -> str:
        return f"{self.source.stem}_{self.format}" if self.format else self.source.stem

    @property
    def defines(self) -> list[str]:
        return ["-DDEVICE_HALF", *([f"-DFORMAT={self.format}"] if self.format else [])]


# ---- what there is to build


def layout() -> ModuleType:
    """formats/layout.py, read so that neither the package nor torch has to be importable."""
    return load_file("superl8_layout", LAYOUT)


def kernel_sources() -> list[Path]:
    return sorted(CSRC.rglob("*.cu"))


def images() -> list[Image]:
    """Every image of the checkout, in the order of their names."""
    table = layout()
    rows = {id(row): row for row in (*table.LAYOUTS.values(), *table.KV_LAYOUTS.values())}.values()  # aliases share
    found = []
    for source in kernel_sources():
        formats = [row.name for row in rows if source.stem in getattr(row, "ops", ())]
        found += [Image(source, name) for name in formats or [None]]
    return sorted(found, key=lambda image: image.name)


def source_hash() -> str:
    """Hash of every file that the extension is made of; stamped into it, so that a stale one can be told."""
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".py"))
    parts = [f"{path.relative_to(ROOT)}\0{path.read_text()}" for path in [*files, LAYOUT]]
    return toolchain.digest(*parts)[:16]


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def archs() -> list[str]:
    """Architectures asked for. Raises BuildError for a name that is not sm_XX or compute_XX."""
    names = os.environ.get("SUPERL8_ARCHS", "").split() or DEFAULT_ARCHS.split()
    for name in names:
        if not re.fullmatch(r"(sm|compute)_\d+", name):
            raise BuildError(f"SUPERL8_ARCHS: {name!r} is no architecture; wanted names like sm_70 or compute_70")
    return list(dict.fromkeys(names))


def generated_headers() -> Path:
    """Folder with format_layout.h (the format table) and host_halves.h (the list of .cu files)."""
    halves = "".join(f'#include "{source.relative_to(CSRC)}"\n' for source in kernel_sources())
    files = {"format_layout.h": layout().header(), "host_halves.h": halves}

    def make(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    return toolchain.cached("headers-" + toolchain.digest(*files.values())[:32], make)


# ---- the steps


def compile_image(image: Image, wanted: list[str]) -> Path:
    """Cache entry with image.fatbin, <arch>.cubin and kernels.json (see nvrtc.py) of one image.

    Raises BuildError if it does not compile, or if a kernel spills registers on sm_70.
    """
    headers = generated_headers()
    includes = [CSRC, headers, *(toolchain.wheel_file(*item) for item in CUDA_INCLUDES)]
    # 177: constants that only the host half uses
    defines = ["--std=c++17", "--diag-suppress=177", *image.defines]
    wheels = [f"{dist} {importlib.metadata.version(dist)}" for dist, _ in (NVRTC, NVFATBIN, *CUDA_INCLUDES)]
    key = toolchain.digest(
        *toolchain.inclusion(image.source, [CSRC, headers]), *defines, *wanted, *wheels, (CSRC / "nvrtc.py").read_text()
    )

    def make(folder: Path) -> None:
        request = {
            "source": str(image.source),
            "archs": wanted,
            "options": [*defines, *(f"--include-path={path}" for path in includes)],
            "nvrtc": str(toolchain.wheel_file(*NVRTC)),
            "nvfatbin": str(toolchain.wheel_file(*NVFATBIN)),
            "out": str(folder),
        }
        toolchain.run([sys.executable, str(CSRC / "nvrtc.py"), json.dumps(request)], f"image {image.name}")

    entry = toolchain.cached(f"image-{image.name}-{key[:32]}", make)
    resources = json.loads((entry / "kernels.json").read_text())["resources"]
    for kernel, used in resources.get(NO_SPILL_ARCH, {}).items():
        if used["spills"]:
            raise BuildError(
                f"{image.source.name}: {kernel} spills {used['spills']} bytes of registers on {NO_SPILL_ARCH} "
                f"({used['registers']} in use). Give a thread less to hold, or relax its launch bounds"
            )
    return entry


def host_flags() -> list[str]:
    """g++ flags of the launchers. Raises BuildError if Python's headers or pybind11 are missing."""
    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").exists():
        raise BuildError(
            f"{python} has no Python.h. Install Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
        )
    try:
        import pybind11
    except ImportError:
        raise BuildError("pybind11 is not installed: pip install pybind11") from None
    includes = [
        python,
        pybind11.get_include(),
        CSRC,
        generated_headers(),
        *(toolchain.wheel_file(*item) for item in CUDA_INCLUDES),
    ]
    return ["-O2", "-Wall", "-fvisibility=hidden", *(f"-I{path}" for path in includes)]


def compile_module() -> Path:
    """Object file of module.cpp with every host half; the emulator of the tests links the same one."""
    return toolchain.compile_object(CSRC / "module.cpp", host_flags())


def embedded(entries: dict[str, Path], wanted: list[str]) -> str:
    """C++ source with the images, the table of kernels and what build_info() tells."""
    lines = ['#include "backend.h"', '#include "embedded.h"']
    kernels, info = [], {}
    for number, (name, entry) in enumerate(entries.items()):
        lines.append(
            f'asm(".section .rodata.superl8_{name},\\"a\\"\\n.balign 16\\n.globl image_{name}\\n.hidden image_{name}\\n'
            f'image_{name}:\\n.incbin \\"{entry / "image.fatbin"}\\"\\n.previous");'
        )
        lines.append(f'extern "C" const unsigned char image_{name}[];')
        made = json.loads((entry / "kernels.json").read_text())
        resources = made["resources"].get(NO_SPILL_ARCH) or next(iter(made["resources"].values()))
        for symbol in made["symbols"]:
            if symbol in info:
                raise BuildError(f"kernel {symbol} is in image {name} and in image {info[symbol]['image']}")
            info[symbol] = {"image": name, **resources.get(symbol, {})}
            kernels.append(f'    {{"{symbol}", {number}}},')
    build_info = {
        "version": version(),
        "archs": wanted,
        "nvrtc": importlib.metadata.version(NVRTC[0]),
        "source_hash": source_hash(),
        "images": list(entries),
        "kernels": info,
    }
    lines += [
        "const EmbeddedImage embedded_images[] = {",
        *(f'    {{"{name}", image_{name}}},' for name in entries),
        "};",
    ]
    lines += [f"const int num_embedded_images = {len(entries)};"]
    lines += ["const EmbeddedKernel embedded_kernels[] = {", *kernels, "};"]
    lines += [f"const int num_embedded_kernels = {len(kernels)};"]
    lines += [f'const char build_info_json[] = R"json({json.dumps(build_info)})json";']
    return "\n".join(lines) + "\n"


def report(entries: dict[str, Path]) -> None:
    """Print registers, spills and shared memory of every kernel."""
    for entry in entries.values():
        for arch, kernels in json.loads((entry / "kernels.json").read_text())["resources"].items():
            for kernel, used in kernels.items():
                print(
                    f"  {arch} {kernel}: {used['registers']} registers, {used['spills']} bytes spilled, "
                    f"{used['local']} local, {used['shared']} shared"
                )


def build_extension(target: Path) -> None:
    """Build the extension module at path `target`. Raises BuildError."""
    start = time.monotonic()
    wanted, found = archs(), images()
    toolchain.gxx()  # its absence is told before anything else is tried
    toolchain.wheel_file(*CUDART)
    jobs = len(os.sched_getaffinity(0))
    generated_headers()
    with ThreadPoolExecutor(jobs) as pool:
        module = pool.submit(compile_module)
        launcher = pool.submit(toolchain.compile_object, CSRC / "launch.cpp", host_flags())
        by_size = sorted(found, key=lambda image: -image.source.stat().st_size)
        pending = {image.name: pool.submit(compile_image, image, wanted) for image in by_size}
        try:
            entries = {image.name: pending[image.name].result() for image in found}
            objects = [module.result(), launcher.result()]
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    report(entries)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        table = Path(work) / "embedded.cpp"
        table.write_text(embedded(entries, wanted))
        linked = target.with_suffix(".new")
        toolchain.run(
            [
                *toolchain.gxx().split(), "-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", f"-I{CSRC}",
                str(table), *map(str, objects), str(toolchain.wheel_file(*CUDART)), "-ldl", "-lrt", "-lpthread",
                "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-s", "-o", str(linked),
            ],
            "the extension",
        )  # fmt: skip
        linked.rename(target)
    toolchain.prune_cache()
    print(
        f"superl8: {target.name} with {len(entries)} images for {' '.join(wanted)}, "
        f"{target.stat().st_size / 1e6:.1f} MB, built in {time.monotonic() - start:.0f} s"
    )


# ---- setuptools


def setup_arguments() -> dict:
    """What setup.py passes to setuptools.setup()."""
    if os.environ.get("SUPERL8_PURE_PYTHON", "0") == "1":
        return {}
    from setuptools import Extension
    from setuptools.command.build_ext import build_ext

    class BuildExtension(build_ext):
        def build_extension(self, extension):
            try:
                build_extension(Path(self.get_ext_fullpath(extension.name)).resolve())
            except BuildError as error:
                raise SystemExit(f"superl8: {error}") from None

    return {
        "ext_modules": [Extension("vllm_superl8._C", sources=[])],
        "cmdclass": {"build_ext": BuildExtension},
    }


if __name__ == "__main__":
    try:
        build_extension(ROOT / "vllm_superl8" / ("_C" + sysconfig.get_config_var("EXT_SUFFIX")))
    except BuildError as error:
        raise SystemExit(f"superl8: {error}") from None
