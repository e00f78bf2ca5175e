# SPDX-License-Identifier: BSD-3-Clause
"""Compiles one kernel image: CUDA source -> NVRTC -> cubins and PTX -> one fat binary. Standard library only.

Run as a program by build.py, one process an image, because NVRTC compiles one thing at a time within a process:

    python nvrtc.py '{"source": ..., "archs": [...], "options": [...], "nvrtc": ..., "nvfatbin": ..., "out": DIR}'

It writes image.fatbin, <arch>.cubin and kernels.json ({arch: {kernel: resources}}, and the symbols) to DIR, prints the
compiler's warnings, and ends with exit status 1 and the compiler's log when something does not compile.
"""

import ctypes
import json
import re
import sys
from pathlib import Path


class CompileError(Exception):
    """The compiler's log is the message."""


class Library:
    """A C library whose functions return 0 for success and give their results through pointers."""

    def __init__(self, path: str, error_text: str):
        self._library = ctypes.CDLL(path)
        self._error_text = getattr(self._library, error_text)
        self._error_text.restype = ctypes.c_char_p

    def status(self, name: str, *args) -> int:
        return getattr(self._library, name)(*args)

    def call(self, name: str, *args) -> None:
        status = self.status(name, *args)
        if status:
            raise CompileError(f"{name}: {self._error_text(status).decode()}")

    def bytes(self, get: str, get_size: str, handle) -> bytes:
        size = ctypes.c_size_t()
        self.call(get_size, handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self.call(get, handle, buffer)
        return buffer.raw[: size.value]


def _strings(values):
    return (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


def compile_arch(nvrtc: Library, source: Path, sm: str, options: list[str]) -> tuple[bytes, bytes, str]:
    """Cubin, PTX and log of one source file for sm_XX. Raises CompileError with the log."""
    program = ctypes.c_void_p()
    nvrtc.call(
        "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), str(source).encode(), 0, None, None
    )  # fmt: skip
    options = [f"--gpu-architecture={sm}", "--ptxas-options=-v", *options]
    status = nvrtc.status("nvrtcCompileProgram", program, len(options), _strings(options))
    log = nvrtc.bytes("nvrtcGetProgramLog", "nvrtcGetProgramLogSize", program).rstrip(b"\0").decode(errors="replace")
    if status:
        raise CompileError(log or f"nvrtcCompileProgram gave status {status} without a log")
    cubin = nvrtc.bytes("nvrtcGetCUBIN", "nvrtcGetCUBINSize", program)
    ptx = nvrtc.bytes("nvrtcGetPTX", "nvrtcGetPTXSize", program)
    nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))
    return cubin, ptx, log


def pack(nvfatbin: Library, parts: list[tuple[str, bytes]]) -> bytes:
    """One fat binary of ("sm_XX", cubin) and ("compute_XX", ptx) parts."""
    handle = ctypes.c_void_p()
    options = ["-64", "-cuda", "-compress-all"]
    nvfatbin.call("nvFatbinCreate", ctypes.byref(handle), _strings(options), ctypes.c_size_t(len(options)))
    for arch, data in parts:
        kind, number = arch.split("_")
        size = ctypes.c_size_t(len(data))
        if kind == "sm":
            nvfatbin.call("nvFatbinAddCubin", handle, data, size, number.encode(), b"superl8")
        else:
            nvfatbin.call("nvFatbinAddPTX", handle, data, size, number.encode(), b"superl8", b"")
    fatbin = nvfatbin.bytes("nvFatbinGet", "nvFatbinSize", handle)
    nvfatbin.call("nvFatbinDestroy", ctypes.byref(handle))
    return fatbin


def parse_resources(log: str) -> dict[str, dict[str, int]]:
    """Kernel -> registers, spills, local and shared (bytes) from the lines that ptxas -v writes for each."""
    resources: dict[str, dict[str, int]] = {}
    current = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            current = resources.setdefault(match[1], {"registers": 0, "spills": 0, "local": 0, "shared": 0})
        elif current is None:
            continue
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current["local"] = max(current["local"], int(match[1]))
            current["spills"] += int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current["shared"] = int(shared[1]) if shared else 0
    return resources


def warnings_of(log: str) -> str:
    """The log without what ptxas -v adds to it."""
    noise = re.compile(r"^ptxas info|bytes stack frame|Architectures prior to|^\s*$")
    return "\n".join(line for line in log.splitlines() if not noise.search(line))


def main(request: dict) -> None:
    """Compile one image as the module's docstring says."""
    nvrtc = Library(request["nvrtc"], "nvrtcGetErrorString")
    nvfatbin = Library(request["nvfatbin"], "nvFatbinGetErrorString")
    source, out = Path(request["source"]), Path(request["out"])
    compiled = {}
    kernels = {}
    symbols: list[str] = []
    for number in dict.fromkeys(arch.split("_")[1] for arch in request["archs"]):
        cubin, ptx, log = compile_arch(nvrtc, source, f"sm_{number}", request["options"])
        compiled[f"sm_{number}"], compiled[f"compute_{number}"] = cubin, ptx
        kernels[f"sm_{number}"] = parse_resources(log)
        symbols = re.findall(r"^\s*(?:\.visible\s+)?\.entry\s+(\w+)", ptx.decode(errors="replace"), re.MULTILINE)
        (out / f"sm_{number}.cubin").write_bytes(cubin)
        if warnings := warnings_of(log):
            print(warnings, file=sys.stderr)
    (out / "image.fatbin").write_bytes(pack(nvfatbin, [(arch, compiled[arch]) for arch in request["archs"]]))
    (out / "kernels.json").write_text(json.dumps({"symbols": symbols, "resources": kernels}))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except CompileError as error:
        raise SystemExit(str(error)) from None
