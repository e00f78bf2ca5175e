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
    """

    name: str
    values: int
    bytes: int
    codec: str
    doc: str
    ops: tuple[str, ...] = ()


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


LAYOUTS: dict[str, Layout] = _table(
    (
        Layout(
            "int8",
            values=1,
            bytes=1,
            codec="int8",
            doc="int8 codes in [-127, 127]; fp32 scales apart, one a row or one a row and group of 128 along K",
        ),
    )
)

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
        lines.append(
            f"struct layout_{row.name} {{ static constexpr int values = {row.values}, bytes = {row.bytes}; }};"
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
