# SPDX-License-Identifier: BSD-3-Clause
"""Is a ``.superl8`` file whole, and how far from its source are its values?"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_superl8.checkpoint.superl8_decode import decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError
from vllm_superl8.quant.container.source import Source

CHUNK_ROWS_VALUES = 1 << 22


@dataclass(frozen=True)
class Row:
    """A tensor against its source.

    sqnr_db   10 log10 of signal to error power; infinite where they are equal, None where one of both is missing
    problem   what is wrong, or ""
    """

    name: str
    scheme: str
    sqnr_db: float | None
    problem: str = ""


def damaged(file: Superl8File, advance: Callable[[], None] = lambda: None) -> list[str]:
    """What the CRCs find, a line a blob; also blobs that have none."""
    found = []
    for blob in (*file.header.tensors.values(), *file.header.files.values()):
        try:
            file.check(blob)
        except ContainerError as error:
            found.append(str(error))
        if blob.crc32 is None:
            found.append(f"{file.header.path}: tensor {blob.name} has no CRC, so damage would not be seen")
        advance()
    return found


def compare(
    file: Superl8File, source: Source, min_sqnr_db: float, advance: Callable[[], None] = lambda: None
) -> list[Row]:
    """Every tensor of the file and of the source; quantised ones below `min_sqnr_db` and raw ones that differ at all
    have a problem."""
    header = file.header
    left = set(header.tensors) - header.scales
    rows = []
    for name, value in source.tensors():
        if name not in left:
            rows.append(Row(name, "-", None, "missing in the file"))
        else:
            left.remove(name)
            rows.append(_row(file, name, value, min_sqnr_db))
        advance()
    rows += [Row(name, header.tensors[name].scheme, None, "missing in the source") for name in sorted(left)]
    return rows


def _row(file: Superl8File, name: str, value: torch.Tensor, min_sqnr_db: float) -> Row:
    scheme = file.header.tensors[name].scheme
    try:
        got = decode(file, name)
    except ContainerError as error:
        return Row(name, scheme, None, str(error))
    if got.shape != value.shape:
        return Row(name, scheme, None, f"shape {list(got.shape)}, the source has {list(value.shape)}")
    ratio = sqnr_db(got, value)
    if scheme == "raw":
        return Row(name, scheme, ratio, "" if ratio == math.inf else "raw and not equal to the source")
    return Row(name, scheme, ratio, "" if ratio >= min_sqnr_db else f"below {min_sqnr_db:g} dB")


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """10 log10(sum want^2 / sum (got - want)^2); inf where they are equal, NaN where one is not finite."""
    got, want = got.reshape(-1), want.reshape(-1)
    signal = noise = 0.0
    for start in range(0, len(want), CHUNK_ROWS_VALUES):
        part = slice(start, start + CHUNK_ROWS_VALUES)
        wanted = want[part].double()
        signal += wanted.square().sum().item()
        noise += (got[part].double() - wanted).square().sum().item()
    if noise == 0:
        return math.inf
    return (
        10 * math.log10(signal / noise)
        if signal > 0 and math.isfinite(noise)
        else -math.inf
        if signal == 0
        else math.nan
    )
