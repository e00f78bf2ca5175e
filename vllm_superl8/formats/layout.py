# SPDX-License-Identifier: BSD-3-Clause
"""Every storage format once: its name, values and bytes a block, and the ops that take it.

Standard library only, because the build reads this file to write ``format_layout.h`` for the kernels.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Layout:
    """One format of quantised weights, as stored.

    name    also the suffix of its kernels
    values  weights in a block
    bytes   bytes of a block
    codec   formats/<codec>.py and csrc/formats/<codec>.cuh read and write it
    ops     ops with a kernel for it, one image each
    planes  bytes a block in each of the tensors that a matrix is kept in (formats.blocks), if it is more than one
    ggml    name of the GGUF type that is rearranged into these planes, byte for byte as many
    """

    name: str
    values: int
    bytes: int
    codec: str
    doc: str
    ops: tuple[str, ...] = ()
    planes: tuple[int, ...] = ()
    ggml: str = ""


@dataclass(frozen=True)
class Plane:
    """How K, or V, of one token and KV head is stored: a row of codes, and scales kept apart from them.

    codec        what codes and scales mean: a name of formats/kv.py and csrc/formats/kv.cuh
    bits         a code
    scale_bytes  of a scale: 4 is fp32, 2 is fp16; 0: codes are floating point and have none
    group        values that share a scale; 0: the whole row
    padded_to    a row of codes is stored as if it had this multiple of values
    """

    codec: str
    bits: int
    scale_bytes: int = 0
    group: int = 0
    padded_to: int = 1

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of a row of codes."""
        return -(-head_dim // self.padded_to) * self.padded_to * self.bits // 8

    def groups(self, head_dim: int) -> int:
        """Scales of a row; the last one may be of fewer values."""
        return -(-head_dim // self.group) if self.group else 1

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of codes and scales of a row."""
        return self.code_bytes(head_dim) + self.groups(head_dim) * self.scale_bytes


@dataclass(frozen=True)
class KVLayout:
    """One format of the paged KV cache.

    A page holds, for each KV head, four planes in this order, page_size tokens each: K codes, V codes,
    K scales, V scales. Keeping the planes apart leaves every token's int8 codes 16-byte aligned for any head_dim
    that is a multiple of 16, and a page of one head is one contiguous read.
    page_size is a multiple of 16 and head_dim one of 8.

    name     as given to --kv-cache-dtype ("auto" follows the model's dtype), and the suffix of its kernels
    aliases  other names that mean the same format
    ops      kernels with an image for it; csrc/formats/kv.cuh decodes it as kv_<name>
    """

    name: str
    k: Plane
    v: Plane
    doc: str
    aliases: tuple[str, ...] = ()
    ops: tuple[str, ...] = ("kv_write", "attn_decode", "attn_prefill")

    @property
    def quantized(self) -> bool:
        return self.k.scale_bytes > 0

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one KV head: K, V and their scales."""
        return self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim)


def _table(rows):
    table = {}
    for row in rows:
        for name in (row.name, *getattr(row, "aliases", ())):
            if name in table:
                raise ValueError(f"formats.layout: two formats are called {name!r}")
            table[name] = row
    return table


BLOCK_OPS = ("block_gemm", "block_embedding")
"""Ops that take every format of blocks."""


def _gguf(ggml: str, values: int, planes: tuple[int, ...], codec: str, doc: str) -> Layout:
    """A GGUF type. Planes stand in the order of their alignment, so that each is read in words of its own size."""
    return Layout(ggml.lower(), values, sum(planes), codec, doc, BLOCK_OPS, planes, ggml)


LAYOUTS: dict[str, Layout] = _table(
    (
        Layout(
            "int8",
            values=1,
            bytes=1,
            codec="int8",
            doc="int8 codes in [-127, 127]; fp32 scales apart, one a row or one a row and group of 128 along K",
        ),
        Layout(
            "int4",
            values=32,
            bytes=16,
            codec="int4",
            doc="4-bit codes, even column low, value = scale * (code - 8); scales apart, one a group of 32, 64 or 128",
            ops=BLOCK_OPS,
            planes=(16,),
        ),
        Layout(
            "int4_zero",
            values=32,
            bytes=16,
            codec="int4",
            doc="the same with value = scale * (code - zero); zeros apart, one byte a group",
            ops=BLOCK_OPS,
            planes=(16,),
        ),
        Layout(
            "int3",
            values=32,
            bytes=12,
            codec="int3",
            doc="3-bit codes, value = scale * (code - 4): low bits 8 bytes, high bits 4; scales apart as int4's",
            ops=BLOCK_OPS,
            planes=(12,),
        ),
        _gguf("Q4_0", 32, (16, 2), "gguf_basic", "nibbles; half d"),
        _gguf("Q4_1", 32, (16, 4), "gguf_basic", "nibbles; half d, half m"),
        _gguf("Q5_0", 32, (16, 4, 2), "gguf_basic", "nibbles; fifth bits; half d"),
        _gguf("Q5_1", 32, (16, 4, 4), "gguf_basic", "nibbles; fifth bits; half d, half m"),
        _gguf("Q8_0", 32, (16, 16, 2), "gguf_basic", "int8 of the first 16 values; of the last 16; half d"),
        _gguf("IQ4_NL", 32, (16, 2), "gguf_basic", "nibbles, numbers of 16 levels; half d"),
        _gguf("MXFP4", 32, (16, 1), "gguf_basic", "nibbles, numbers of e2m1 values; exponent"),
        _gguf("Q2_K", 256, (64, 16, 4), "gguf_k", "2-bit codes; scales and minima of 16 values; half d, half dmin"),
        _gguf("Q3_K", 256, (64, 32, 12, 2), "gguf_k", "low 2 bits; third bits; 6-bit scales of 16 values; half d"),
        _gguf("Q4_K", 256, (128, 16), "gguf_k", "nibbles; half d, half dmin, 12 bytes of 6-bit scales and minima"),
        _gguf("Q5_K", 256, (128, 32, 16), "gguf_k", "nibbles; fifth bits; half d, dmin, scales and minima as Q4_K"),
        _gguf("Q6_K", 256, (128, 64, 16, 2), "gguf_k", "nibbles; bits 4 and 5; int8 scales of 16 values; half d"),
        _gguf("IQ4_XS", 256, (128, 8), "gguf_k", "nibbles, numbers of 16 levels; half d, 6-bit scales"),
        _gguf("IQ1_S", 256, (32, 16, 2), "gguf_iq", "grid numbers; their high bits, scale and shift; half d"),
        _gguf("IQ1_M", 256, (32, 16, 8), "gguf_iq", "grid numbers; their high bits and shifts; scales and half d"),
        _gguf("IQ2_XXS", 256, (64, 2), "gguf_iq", "four grid numbers, signs and scale; half d"),
        _gguf("IQ2_XS", 256, (64, 8, 2), "gguf_iq", "grid numbers and signs; scales of 16 values; half d"),
        _gguf("IQ2_S", 256, (32, 32, 8, 8, 2), "gguf_iq", "grid numbers; signs; high bits; scales of 16; half d"),
        _gguf("IQ3_XXS", 256, (64, 32, 2), "gguf_iq", "grid numbers; signs and scale; half d"),
        _gguf("IQ3_S", 256, (64, 32, 8, 4, 2), "gguf_iq", "grid numbers; signs; ninth bits; scales; half d"),
        _gguf("TQ1_0", 256, (48, 4, 2), "gguf_k", "five ternary values a byte; four a byte; half d"),
        _gguf("TQ2_0", 256, (64, 2), "gguf_k", "2-bit codes of ternary values; half d"),
    )
)

GGML: dict[str, Layout] = {row.ggml: row for row in LAYOUTS.values() if row.ggml}
"""GGUF type to the format that holds it."""

NF4_LEVELS = (
    -1.0, -0.6962890625, -0.52490234375, -0.39501953125, -0.284423828125, -0.184814453125, -0.091064453125, 0.0,
    0.07958984375, 0.160888671875, 0.24609375, 0.337890625, 0.440673828125, 0.5625, 0.72314453125, 1.0,
)  # fmt: skip
"""The 16 levels of NF4 (arXiv:2305.14314, appendix E) rounded to fp16, which kernels look them up in."""

LLOYD_LEVELS = (-1036.0, -647.0, -364.0, -118.0, 118.0, 364.0, 647.0, 1036.0)
"""The Lloyd-Max levels of a normal distribution, +-{0.245098, 0.756096, 1.343909, 2.152135} (Max 1960, table I), as
integers in these ratios to within 6e-5; LLOYD_UNIT turns them into shares of a block's norm."""

LLOYD_BLOCK = 128
LLOYD_UNIT = 0.0020772260367860713 * LLOYD_BLOCK**-0.5

INT8_TOKEN = Plane("int8", 8, scale_bytes=4)

KV_LAYOUTS: dict[str, KVLayout] = _table(
    (
        KVLayout("fp16", k=Plane("float", 16), v=Plane("float", 16), doc="half precision", aliases=("float16",)),
        KVLayout("bf16", k=Plane("float", 16), v=Plane("float", 16), doc="bfloat16", aliases=("bfloat16",)),
        KVLayout("fp32", k=Plane("float", 32), v=Plane("float", 32), doc="single precision", aliases=("float32",)),
        KVLayout(
            "int8",
            k=INT8_TOKEN,
            v=INT8_TOKEN,
            doc="int8 codes in [-127, 127], one fp32 scale a token and head for K and one for V",
            aliases=("k8v8", "int8_per_token_head"),
        ),
        KVLayout(
            "k8v8_g32",
            k=Plane("int8", 8, scale_bytes=2, group=32),
            v=INT8_TOKEN,
            doc="as int8, with an fp16 scale for each 32 values of K",
        ),
        KVLayout(
            "k8v8_g16",
            k=Plane("int8", 8, scale_bytes=2, group=16),
            v=INT8_TOKEN,
            doc="as int8, with an fp16 scale for each 16 values of K",
        ),
        KVLayout(
            "k8v4",
            k=INT8_TOKEN,
            v=Plane("nf4", 4, scale_bytes=2, group=32),
            doc="K as int8; V as NF4 with an fp16 scale (the largest magnitude) for each 32 values, "
            "even values in the low half of a byte",
        ),
        KVLayout(
            "k8v3",
            k=INT8_TOKEN,
            v=Plane("lloyd", 3, scale_bytes=4, group=LLOYD_BLOCK, padded_to=32),
            doc="K as int8; V as 3-bit Lloyd-Max codes, a stream from the lowest bit of 32-bit words on, with the fp32 "
            "norm of each 128 values (of fewer at the end of a row: theirs times sqrt(128 / values))",
        ),
    )
)


def header() -> str:
    """The C++ header that ties the kernels to this table."""
    lines = ["#pragma once", "// Written by the build from vllm_superl8/formats/layout.py."]
    for row in LAYOUTS.values():
        planes = ", ".join(map(str, row.planes or (row.bytes,)))
        lines.append(
            f"struct layout_{row.name} {{ static constexpr int values = {row.values}, bytes = {row.bytes}, "
            f"plane_bytes[] = {{{planes}}}; }};"
        )
    for row in {row.name: row for row in KV_LAYOUTS.values()}.values():
        planes = ", ".join(
            f"{kind}_{f.name} = {getattr(plane, f.name)}"
            for kind, plane in (("k", row.k), ("v", row.v))
            for f in fields(Plane)
            if f.name != "codec"
        )
        lines.append(f"struct kv_layout_{row.name} {{ static constexpr int {planes}; }};")
    for name in ("NF4_LEVELS", "LLOYD_LEVELS"):
        values = ", ".join(f"{level!r}f" for level in globals()[name])
        lines.append(f"#define {name} {{{values}}}")
    lines.append(f"constexpr int LLOYD_BLOCK = {LLOYD_BLOCK};")
    lines.append(f"constexpr float LLOYD_UNIT = {LLOYD_UNIT!r}f;")
    return "\n".join(lines) + "\n"
