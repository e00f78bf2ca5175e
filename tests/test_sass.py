# SPDX-License-Identifier: BSD-3-Clause
"""The sm_70 machine code of every kernel: no spills or local memory, within Volta's limits, dp4a where it belongs.

Instructions are told by the low nine bits of their 128: the opcode without the bits that say where operands come from.
The codes were read off nvdisasm 12.8 on all kernels of this project (2026-12-01: 103 opcodes, none with two meanings).
"""

import collections
import json
import re
import struct

import pytest

import elf
import emulator

BUILD = emulator.builder()
IDP, STORE_LOCAL, LOAD_LOCAL = 0x026, 0x187, 0x183

# Kernels that multiply int8 by dp4a. All others are to have none.
DP4A = re.compile(
    r"(block_)?gem[mv]_(?!sum)|moe_gemm_|moe_gemv|attn_decode_(int8|k8)|attn_prefill_(int8|k8)|probe_dp4a$"
)
MAX_SHARED_BYTES = 96 * 1024
MAX_REGISTERS = 255


def opcodes(cubin, kernel):
    """How often each opcode stands in a kernel's machine code."""
    (code,) = [section.data for section in elf.sections(cubin) if section.name == f".text.{kernel}"]
    return collections.Counter(low & 0x1FF for low, _ in struct.iter_unpack("<QQ", code))


def compiled(image):
    """Path of an image's sm_70 cubin, and the resources of its kernels."""
    entry = BUILD.compile_image(image, BUILD.DEFAULT_ARCHS.split())
    return entry / "sm_70.cubin", json.loads((entry / "kernels.json").read_text())["resources"]["sm_70"]


@pytest.mark.parametrize("image", BUILD.images(), ids=lambda image: image.name)
def test_kernels_keep_to_volta(image):
    cubin, resources = compiled(image)
    assert resources, f"{image.name} has no kernel"
    for kernel, used in resources.items():
        found = opcodes(cubin, kernel)
        assert sum(found.values()) > 8, f"{kernel} is empty"
        assert (used["spills"], used["local"], found[STORE_LOCAL], found[LOAD_LOCAL]) == (0, 0, 0, 0), kernel
        assert used["shared"] <= MAX_SHARED_BYTES, kernel
        assert used["registers"] <= MAX_REGISTERS, kernel
        assert (found[IDP] > 0) == bool(DP4A.match(kernel)), f"{kernel} has {found[IDP]} dp4a instructions"


def test_the_scan_sees_dp4a_and_local_memory(tmp_path):
    source = tmp_path / "scanned.cu"
    source.write_text(
        '#include "common/device.cuh"\n'
        "struct Params { const int* in; int* out; int n; };\n"
        "KERNEL(dots, Params, 32) {\n"
        "    const int i = threadIdx.x;\n"
        "    p.out[i] = __dp4a(p.in[i], p.in[i + 32], __dp4a(p.in[i + 64], p.in[i + 96], 0));\n"
        "}\n"
        "KERNEL(indexed, Params, 32) {\n"
        "    int kept[64] = {};\n"
        "    for (int i = 0; i < p.n; i++) kept[p.in[i]] += i;\n"
        "    p.out[threadIdx.x] = kept[p.n];\n"
        "}\n"
    )
    cubin, resources = compiled(BUILD.Image(source, None))
    dots, indexed = opcodes(cubin, "dots"), opcodes(cubin, "indexed")
    assert (dots[IDP], dots[STORE_LOCAL], dots[LOAD_LOCAL], resources["dots"]["local"]) == (2, 0, 0, 0)
    assert (indexed[IDP], resources["indexed"]["local"]) == (0, 256)
    assert indexed[STORE_LOCAL] > 0
    assert indexed[LOAD_LOCAL] > 0
