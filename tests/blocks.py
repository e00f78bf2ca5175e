# SPDX-License-Identifier: BSD-3-Clause
"""Random weights in every format of blocks, with what they are worth by the outside oracle, in float64."""

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from vllm_superl8.formats import blocks, int3, int4
from vllm_superl8.formats.layout import LAYOUTS

FORMATS = [row.name for row in LAYOUTS.values() if row.planes]
GGUF_FORMATS = [row.name for row in LAYOUTS.values() if row.ggml]

HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "iq4_nl": (0,), "mxfp4": (),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_xs": (0,), "tq1_0": (52,),
    "tq2_0": (64,), "iq1_s": (0,), "iq1_m": (), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,),
    "iq3_s": (0,),
}  # fmt: skip
"""Where a file's block has fp16 numbers; any other byte may be any byte (but see `stored`)."""


@dataclass(frozen=True)
class Weights:
    """planes of (n, k) weights in `format`, and their values in float64."""

    format: str
    planes: list[torch.Tensor]
    values: torch.Tensor

    def on(self, device) -> list[torch.Tensor]:
        return [plane.to(device) for plane in self.planes]


def stored(format: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """(n, bytes) uint8: random valid blocks of a GGUF type. Scales are between 0.001 and 0.1, some negative."""
    layout = LAYOUTS[format]
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (n, k // layout.values, layout.bytes), dtype=np.uint8)
    for offset in HALVES[format]:
        scales = 10 ** rng.uniform(-3, -1, rows.shape[:2]) * rng.choice((1, 1, 1, -1), rows.shape[:2])
        rows[..., offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if format == "mxfp4":  # exponents of floats that are no infinities in float32 sums
        rows[..., 0] = rng.integers(115, 130, rows.shape[:2])
    if format == "iq1_m":  # its fp16 number is cut into the high nibbles of four scales
        scales = (10 ** rng.uniform(-3, -1, rows.shape[:2])).astype(np.float16).view(np.uint16)
        parts = (scales[..., None] >> np.array([0, 4, 8, 12], np.uint16)) & 15
        rows[..., 49::2] = rows[..., 49::2] & 15 | parts.astype(np.uint8) << 4
    return rows.reshape(n, -1)


def weights(format: str, n: int, k: int, seed: int = 0, group_size: int = 32, scale_dtype=torch.float16) -> Weights:
    """Random weights; group_size and scale_dtype are those of int4 and int3."""
    layout = LAYOUTS[format]
    if not layout.ggml:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 8 if format == "int3" else 16, (n, k), generator=generator)
        groups = (n, k // group_size)
        scales = (10 ** (torch.rand(groups, generator=generator) * 2 - 3)).to(scale_dtype)
        zeros = torch.randint(0, 16, groups, generator=generator)
        planes = [(int3 if format == "int3" else int4).pack(codes), scales]
        if format == "int4_zero":
            planes.append(zeros.to(torch.uint8))
        zero = zeros.unsqueeze(-1) if format == "int4_zero" else 4 if format == "int3" else 8
        values = (codes.unflatten(1, (-1, group_size)) - zero) * scales.double().unsqueeze(-1)
        return Weights(format, planes, values.flatten(1))
    rows = stored(format, n, k, seed)
    values = gguf.quants.dequantize(rows, GGMLQuantizationType[layout.ggml])
    return Weights(format, blocks.pack(torch.from_numpy(rows), layout), torch.from_numpy(values).double())
