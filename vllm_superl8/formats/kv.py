# SPDX-License-Identifier: BSD-3-Clause
"""Pages of the KV cache: the reference codec of every format in layout.KV_LAYOUTS.

A cache is (num_pages, num_kv_heads, page_size, content) with page_size * content contiguous; content is counted in
elements of its dtype. formats.layout.KVLayout says how the planes lie in there. Device codecs: csrc/formats/kv.cuh.
"""

import torch

from vllm_superl8.formats import int8
from vllm_superl8.formats.layout import (
    KV_LAYOUTS,
    LLOYD_BLOCK,
    LLOYD_LEVELS,
    LLOYD_UNIT,
    NF4_LEVELS,
    KVLayout,
    Plane,
)

FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtype of a cache that is not quantised."""

STORAGE = {row.name: FLOATS.get(row.name, torch.int8) for row in KV_LAYOUTS.values()}
"""Dtype of a cache in each format."""

SCALES = {2: torch.float16, 4: torch.float32}
"""Dtype of a scale by its bytes."""


def layout_of(cache: torch.Tensor, kv_format: str, head_dim: int) -> KVLayout:
    """The format of a cache, given as a name of KV_LAYOUTS or as "auto": floating point, as the cache's dtype says.

    Raises ValueError for an unknown name, and for a cache of another dtype or content.
    """
    by_dtype = {dtype: name for name, dtype in FLOATS.items()}
    name = by_dtype.get(cache.dtype) if kv_format == "auto" else kv_format
    if name not in KV_LAYOUTS:
        raise ValueError(
            f"KV cache of {cache.dtype} with format {kv_format!r}: wanted auto for floating point, or one of "
            f"{', '.join(sorted(KV_LAYOUTS))}"
        )
    layout = KV_LAYOUTS[name]
    if cache.dtype != STORAGE[layout.name]:
        raise ValueError(f"KV cache of format {kv_format!r} is {cache.dtype}, wanted {STORAGE[layout.name]}")
    content = layout.token_bytes(head_dim) // cache.element_size()
    if cache.dim() != 4 or cache.shape[3] != content:
        raise ValueError(
            f"KV cache of format {kv_format!r} is {tuple(cache.shape)}, wanted (pages, KV heads, page_size, {content}) "
            f"for a head_dim of {head_dim}"
        )
    return layout


# ---- codes and scales of rows (..., head_dim), by Plane.codec


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """(..., head_dim) as (..., groups, group) float32, zeros after the last value."""
    x = x.float()
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def _spread(scales: torch.Tensor, group: int, head_dim: int) -> torch.Tensor:
    """Scales (..., groups) for each of head_dim values, as float32."""
    return scales.float().repeat_interleave(group, -1)[..., :head_dim]


def _nearest(x: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    """Codes (int32) of the levels nearest to x; half-way between two it is the lower one, and the lowest for NaN."""
    table = torch.tensor(levels, device=x.device)
    return torch.bucketize(x.nan_to_num(nan=-torch.inf).contiguous(), (table[1:] + table[:-1]) / 2, out_int32=True)


def _encode_int8(x, plane):
    if not plane.group:
        codes, scales = int8.quantize(x, -1)
        return codes.view(torch.uint8), scales
    grouped = _grouped(x, plane.group)
    amax = grouped.abs().amax(-1)
    scales = (amax / torch.full_like(amax, int8.CODE_MAX)).half()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = torch.round(grouped / scales.float().unsqueeze(-1)).nan_to_num(0.0).clamp(-int8.CODE_MAX, int8.CODE_MAX)
    return codes.to(torch.int8).flatten(-2)[..., : x.shape[-1]].contiguous().view(torch.uint8), scales


def _decode_int8(codes, scales, plane, head_dim):
    return codes.view(torch.int8).float() * _spread(scales, plane.group or head_dim, head_dim)


def _encode_nf4(x, plane):
    grouped = _grouped(x, plane.group)
    scales = grouped.abs().amax(-1).half()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = _nearest(grouped / scales.float().unsqueeze(-1), NF4_LEVELS).flatten(-2)[..., : x.shape[-1]]
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), scales


def _decode_nf4(codes, scales, plane, head_dim):
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    table = torch.tensor(NF4_LEVELS, device=codes.device)
    return table[nibbles.int()] * _spread(scales, plane.group, head_dim)


def _squares(blocks: torch.Tensor) -> torch.Tensor:
    """Sums of squares of (..., 128) float32, summed as a warp does that holds four neighbouring values a lane."""
    quads = (blocks * blocks).unflatten(-1, (-1, 4))
    sums = quads[..., 0] + quads[..., 1] + quads[..., 2] + quads[..., 3]
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums.squeeze(-1)


EIGHT_CODES = torch.arange(0, 24, 3, dtype=torch.int32)  # where each of eight 3-bit codes begins
THREE_BYTES = torch.arange(0, 24, 8, dtype=torch.int32)  # and each of the three bytes that they fill


def _encode_lloyd(x, plane):
    head_dim = x.shape[-1]
    blocks = _grouped(x, LLOYD_BLOCK)
    sizes = [min(LLOYD_BLOCK, head_dim - first) for first in range(0, head_dim, LLOYD_BLOCK)]
    full = torch.tensor([LLOYD_BLOCK / size for size in sizes], device=x.device)
    norms = (_squares(blocks) * full).double().sqrt().float()  # torch rounds the root of a float32 carelessly
    units = torch.where(norms == 0, torch.ones_like(norms), norms) * torch.tensor(LLOYD_UNIT)
    codes = _nearest(blocks / units.unsqueeze(-1), LLOYD_LEVELS).flatten(-2)
    padded = plane.code_bytes(head_dim) * 8 // plane.bits
    eights = codes[..., :padded].unflatten(-1, (-1, 8)) << EIGHT_CODES.to(x.device)
    triples = eights.sum(-1, dtype=torch.int32, keepdim=True) >> THREE_BYTES.to(x.device)
    return triples.to(torch.uint8).flatten(-2), norms  # the low byte of each


def _decode_lloyd(codes, scales, plane, head_dim):
    triples = codes.unflatten(-1, (-1, 3)).int() << THREE_BYTES.to(codes.device)
    eights = triples.sum(-1, dtype=torch.int32, keepdim=True) >> EIGHT_CODES.to(codes.device) & 7
    numbers = eights.flatten(-2)[..., :head_dim]
    units = scales * torch.tensor(LLOYD_UNIT)
    return torch.tensor(LLOYD_LEVELS, device=codes.device)[numbers] * _spread(units, LLOYD_BLOCK, head_dim)


CODECS = {
    "int8": (_encode_int8, _decode_int8),
    "nf4": (_encode_nf4, _decode_nf4),
    "lloyd": (_encode_lloyd, _decode_lloyd),
}
"""encode(x (..., head_dim), plane) -> codes (..., code_bytes) uint8, scales (..., groups); decode is its inverse.

int8   formats.int8's rule for each group, with fp16 scales rounded before values are divided by them
nf4    scale = largest magnitude (0 becomes 1); the level nearest to x / scale
lloyd  scale = norm of the block; the level nearest to x / (norm * LLOYD_UNIT). A norm of 0 divides as 1 and stays 0
NaN or infinity in a group makes its scale NaN or infinity, so that the result cannot pass for a number.
"""


def encode_rows(x: torch.Tensor, plane: Plane) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., code_bytes) uint8 and scales (..., groups) of rows x (..., head_dim) of a quantised plane."""
    return CODECS[plane.codec][0](x, plane)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor, plane: Plane, head_dim: int) -> torch.Tensor:
    """The rows (..., head_dim) float32 of codes and scales."""
    return CODECS[plane.codec][1](codes, scales, plane, head_dim)


# ---- pages


def planes(cache: torch.Tensor, layout: KVLayout, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Views of a cache's planes: K and V (pages, heads, page_size, head_dim), and for a quantised cache their codes as
    bytes (pages, heads, page_size, code_bytes) uint8 and the K and V scales (pages, heads, page_size, groups).

    Raises ValueError if a page of one head is not contiguous.
    """
    pages, heads, page_size, content = cache.shape
    if cache.stride(3) != 1 or cache.stride(2) != content:
        raise ValueError(f"KV cache with strides {cache.stride()}: a page of one head must be contiguous")
    flat = cache.as_strided((pages, heads, page_size * content), (cache.stride(0), cache.stride(1), 1))
    if not layout.quantized:
        return tuple(half.unflatten(-1, (page_size, head_dim)) for half in flat.chunk(2, -1))
    if flat.storage_offset() % 4 or any(stride % 4 for stride in flat.stride()[:2]):
        raise ValueError(f"KV cache with strides {cache.stride()}: scales must be 4-byte aligned")
    kinds = (layout.k, layout.v)
    sizes = [page_size * plane.code_bytes(head_dim) for plane in kinds]
    sizes += [page_size * plane.groups(head_dim) * plane.scale_bytes for plane in kinds]
    parts = flat.split(sizes, -1)
    dtypes = (torch.uint8, torch.uint8, *(SCALES[plane.scale_bytes] for plane in kinds))
    return tuple(part.view(dtype).unflatten(-1, (page_size, -1)) for part, dtype in zip(parts, dtypes, strict=True))


def encode(cache: torch.Tensor, layout: KVLayout, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store key and value (tokens, heads, head_dim) at slots (tokens) int64; negative ones are skipped."""
    page_size = cache.shape[2]
    live = slots >= 0
    slots, key, value = slots[live], key[live], value[live]
    page, offset = slots // page_size, slots % page_size
    views = planes(cache, layout, key.shape[-1])
    for number, (plane, rows) in enumerate(((layout.k, key), (layout.v, value))):
        if layout.quantized:
            codes, scales = encode_rows(rows, plane)
            views[number][page, :, offset] = codes
            views[2 + number][page, :, offset] = scales
        else:
            views[number][page, :, offset] = rows.to(cache.dtype)


def decode(
    cache: torch.Tensor, layout: KVLayout, pages: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the pages numbered in `pages` (n) int64, as float32: (heads, n * page_size, head_dim) each."""
    views = [view.transpose(0, 1)[:, pages].flatten(1, 2) for view in planes(cache, layout, head_dim)]
    if not layout.quantized:
        return views[0].float(), views[1].float()
    return (
        decode_rows(views[0], views[2], layout.k, head_dim),
        decode_rows(views[1], views[3], layout.v, head_dim),
    )
