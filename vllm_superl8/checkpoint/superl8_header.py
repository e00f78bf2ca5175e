# SPDX-License-Identifier: BSD-3-Clause
"""The header of a ``.superl8`` file, every number checked against the file before it is used (format:
formats.container)."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from vllm_superl8.formats.container import (
    ALIGN,
    DTYPES,
    FILES,
    FIXED,
    FOOTER_BYTES,
    FOOTER_MAGIC,
    MAGIC,
    META,
    SCHEMES,
    columns,
)

MAX_HEADER_BYTES = 1 << 28
"""A row takes about 300 bytes; models of 100,000 tensors stay far below."""
MAX_NAME = 512
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 62

DAMAGED = "the file is damaged or cut short; fetch or convert it again"


class ContainerError(ValueError):
    """A file is not a whole ``.superl8`` file, or cannot become one; one line that names the file and the tensor."""


@dataclass(frozen=True)
class Blob:
    """One stored tensor.

    dtype    of the stored elements
    shape    of the stored elements
    offset   of the first byte in the file
    crc32    of its bytes; None: the writer left it out
    scheme   a key of formats.container.SCHEMES
    scale    name of the blob that holds its scales, or None
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int | None
    scheme: str
    scale: str | None = None
    group_size: int | None = None
    codebook: str | None = None
    rotated: bool = False
    hadamard_dim: int | None = None
    smoothed: bool = False
    recipe: Any = None


@dataclass(frozen=True)
class Container:
    """What a file says about its blobs.

    tensors     by name, in the order of the header; scales of other tensors are among them
    files       tokenizer and configuration files by name
    meta        __meta__ without the files
    pp_stages   lists of tensor names, one a pipeline stage
    experts     "layer.expert" to names of its tensors
    variant     "front" or "footer"
    digest      hexadecimal hash of the header and the size of the file
    """

    path: Path
    variant: str
    tensors: dict[str, Blob]
    files: dict[str, Blob]
    meta: dict[str, Any]
    provenance: Any
    pp_stages: tuple[tuple[str, ...], ...]
    experts: dict[str, tuple[str, ...]]
    digest: str

    @property
    def scales(self) -> set[str]:
        """Names of the blobs that hold scales of other tensors."""
        return {blob.scale for blob in self.tensors.values() if blob.scale is not None}


def read_header(path: Path) -> Container:
    """The checked header of a file.

    Raises ContainerError for everything that is not a whole file of this format, and OSError for one that cannot be
    opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(16)
        if start[:8] != MAGIC:
            raise ContainerError(f"{path}: it begins with {start[:8]!r} and not with {MAGIC!r}: no .superl8 file")
        if len(start) < 16:
            raise ContainerError(f"{path}: it ends within its first 16 bytes; {DAMAGED}")
        (length,) = struct.unpack("<Q", start[8:])
        if length:
            variant, at, blobs_start, blobs_end = "front", 16, -(-(16 + length) // ALIGN) * ALIGN, size
            if 16 + length > size:
                raise ContainerError(f"{path}: its header would end at byte {16 + length} of {size}; {DAMAGED}")
        else:
            at, length = _footer(path, file, size)
            variant, blobs_start, blobs_end = "footer", ALIGN, at
        if length > MAX_HEADER_BYTES:
            raise ContainerError(
                f"{path}: its header has {length} bytes, at most {MAX_HEADER_BYTES} are read; {DAMAGED}"
            )
        file.seek(at)
        text = file.read(length)
    return _Reader(path, blobs_start, blobs_end).container(variant, text, size)


def _footer(path: Path, file, size: int) -> tuple[int, int]:
    """(offset, length) of the header of a file of the footer variant."""
    if size < ALIGN + FOOTER_BYTES:
        raise ContainerError(f"{path}: {size} bytes are too few for a footer; {DAMAGED}")
    file.seek(size - FOOTER_BYTES)
    at, length, magic = struct.unpack("<QQ8s", file.read(FOOTER_BYTES))
    if magic != FOOTER_MAGIC:
        raise ContainerError(f"{path}: it ends with {magic!r} and not with {FOOTER_MAGIC!r}; {DAMAGED}")
    if at < ALIGN or length == 0 or at + length > size - FOOTER_BYTES:
        raise ContainerError(f"{path}: its header would be bytes {at} to {at + length} of {size}; {DAMAGED}")
    return at, length


class _Reader:
    """Turns the header's JSON into a Container; blobs have to lie in bytes start to end of the file."""

    def __init__(self, path: Path, start: int, end: int):
        self.path, self.start, self.end = path, start, end

    def refuse(self, why: str) -> NoReturn:
        raise ContainerError(f"{self.path}: {why}")

    def container(self, variant: str, text: bytes, size: int) -> Container:
        header = self.parse(text)
        for key, value in FIXED.items():
            if header.get(key) != value or isinstance(header.get(key), bool):
                self.refuse(f"its {key} is {_short(header.get(key))}, {value!r} is read; another program may read it")
        meta = dict(self.object(header.get(META, {}), META))
        files = self.rows(meta.pop(FILES, {}), f"{META}.{FILES}")
        tensors = self.rows(header.get("tensors"), "tensors")
        for blob in tensors.values():
            self.check_scheme(blob, tensors)
        for blob in files.values():
            if blob.scheme != "raw" or blob.dtype != torch.uint8:
                self.refuse(f"file {blob.name} is {blob.scheme} of {blob.dtype}, wanted raw uint8; {DAMAGED}")
        self.check_overlaps([*tensors.values(), *files.values()])
        shards = self.object(header.get("shards") or {}, "shards")
        stages = shards.get("pp_stages") or []
        if not isinstance(stages, list):
            self.refuse(f"shards.pp_stages is {_short(stages)}, wanted a list; {DAMAGED}")
        experts = self.object(shards.get("experts") or {}, "shards.experts")
        return Container(
            path=self.path,
            variant=variant,
            tensors=tensors,
            files=files,
            meta=meta,
            provenance=header.get("provenance"),
            pp_stages=tuple(self.names(stage, f"shards.pp_stages[{i}]", tensors) for i, stage in enumerate(stages)),
            experts={key: self.names(value, f"shards.experts[{key!r}]", tensors) for key, value in experts.items()},
            digest=hashlib.sha256(text + size.to_bytes(8, "little")).hexdigest(),
        )

    def parse(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text.decode(), object_pairs_hook=self.unique)
        except ContainerError:
            raise
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers of thousands of digits, too deep
            raise ContainerError(f"{self.path}: its header is not JSON ({_short(str(error))}); {DAMAGED}") from error
        return self.object(header, "the header")

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            again = next(key for key in keys if keys.count(key) > 1)
            self.refuse(f"key {_short(again)} is in its header twice; {DAMAGED}")
        return found

    def object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(f"{what} is {_short(value)}, wanted an object; {DAMAGED}")
        return value

    def names(self, value: Any, what: str, tensors: dict[str, Blob]) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.refuse(f"{what} is {_short(value)}, wanted a list of tensor names; {DAMAGED}")
        if unknown := next((name for name in value if name not in tensors), None):
            self.refuse(f"{what} names {_short(unknown)}, which is no tensor of the file; {DAMAGED}")
        return tuple(value)

    def rows(self, value: Any, what: str) -> dict[str, Blob]:
        return {
            name: self.blob(name, self.object(row, f"{what}[{name!r:.80}]"))
            for name, row in self.object(value, what).items()
        }

    def blob(self, name: str, row: dict[str, Any]) -> Blob:
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            self.refuse(f"a tensor is called {_short(name)}, wanted printable text of up to {MAX_NAME} characters")
        dtype = row.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.refuse(f"tensor {name} has dtype {_short(dtype)}, wanted one of {', '.join(DTYPES)}; {DAMAGED}")
        shape = row.get("shape")
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(size) for size in shape):
            self.refuse(f"tensor {name} has shape {_short(shape)}, wanted up to {MAX_DIMS} sizes; {DAMAGED}")
        offset, nbytes, crc32 = row.get("offset"), row.get("nbytes"), row.get("crc32")
        if prod(shape) > MAX_ELEMENTS or nbytes != prod(shape) * DTYPES[dtype].itemsize or not _is_count(nbytes):
            self.refuse(
                f"tensor {name} of shape {_short(shape)} and dtype {dtype} has {_short(nbytes)} bytes; {DAMAGED}"
            )
        if not _is_count(offset) or offset % ALIGN:
            self.refuse(f"tensor {name} is at offset {_short(offset)}, wanted a multiple of {ALIGN}; {DAMAGED}")
        at = self.start + offset
        if at + nbytes > self.end:
            self.refuse(f"tensor {name} would end at byte {at + nbytes}, blobs end at byte {self.end}; {DAMAGED}")
        if crc32 is not None and not (_is_count(crc32) and crc32 < 1 << 32):
            self.refuse(f"tensor {name} has crc32 {_short(crc32)}, wanted a number of 32 bits; {DAMAGED}")
        scheme = row.get("scheme")
        if not isinstance(scheme, str) or scheme not in SCHEMES:
            self.refuse(f"tensor {name} has scheme {_short(scheme)}; this version reads {', '.join(SCHEMES)}")
        for key in ("scale", "codebook"):
            if not isinstance(row.get(key), str | None):
                self.refuse(f"tensor {name} has {key} {_short(row.get(key))}, wanted text or null; {DAMAGED}")
        for key in ("group_size", "hadamard_dim"):
            value = row.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                self.refuse(f"tensor {name} has {key} {_short(value)}, wanted a number or null; {DAMAGED}")
        for key in ("rotated", "smoothed"):
            if not isinstance(row.get(key), bool | None):
                self.refuse(f"tensor {name} has {key} {_short(row.get(key))}, wanted true or false; {DAMAGED}")
        return Blob(
            name=name,
            dtype=DTYPES[dtype],
            shape=tuple(shape),
            offset=at,
            nbytes=nbytes,
            crc32=crc32,
            scheme=scheme,
            scale=row.get("scale"),
            group_size=row.get("group_size"),
            codebook=row.get("codebook"),
            rotated=bool(row.get("rotated")),
            hadamard_dim=row.get("hadamard_dim"),
            smoothed=bool(row.get("smoothed")),
            recipe=row.get("recipe"),
        )

    def check_scheme(self, blob: Blob, tensors: dict[str, Blob]) -> None:
        """Codes and scales have the dtype and shapes of the scheme."""
        scheme = SCHEMES[blob.scheme]
        what = f"tensor {blob.name} of scheme {blob.scheme}"
        if scheme.dtype is not None and (DTYPES[scheme.dtype] != blob.dtype or len(blob.shape) != 2):
            self.refuse(f"{what} is {blob.dtype} {list(blob.shape)}, wanted a matrix of {scheme.dtype}; {DAMAGED}")
        if scheme.codebooks is not None and blob.codebook not in scheme.codebooks:
            self.refuse(f"{what} has codebook {_short(blob.codebook)}, wanted one of {', '.join(scheme.codebooks)}")
        if blob.scheme == "gguf_kquant" and blob.codebook is None:
            self.refuse(f"{what} has no codebook, which names its GGUF type; {DAMAGED}")
        if blob.scheme == "per_group_w3a8" and blob.shape[1] % 3:
            self.refuse(f"{what} has rows of {blob.shape[1]} words, wanted three for 32 columns; {DAMAGED}")
        if not scheme.scaled:
            return
        scales = tensors.get(blob.scale)
        if scales is None:
            self.refuse(f"{what} has its scales in {_short(blob.scale)}, which is no tensor of the file; {DAMAGED}")
        if scales.dtype != torch.float32 or scales.scheme != "raw":
            self.refuse(f"tensor {scales.name} holds scales and is {scales.scheme} of {scales.dtype}, wanted float32")
        rows, k = blob.shape[0], columns(blob.scheme, blob.shape[1])
        wanted = [(rows,), (rows, 1)]
        if scheme.grouped:
            if blob.group_size is None or blob.group_size < 1:
                self.refuse(f"{what} has group_size {blob.group_size}, wanted a positive number; {DAMAGED}")
            wanted = [(rows, -(-k // blob.group_size))]
        if scales.shape not in wanted:
            self.refuse(
                f"tensor {scales.name} has shape {list(scales.shape)}, {what} wants {list(wanted[0])}; {DAMAGED}"
            )

    def check_overlaps(self, blobs: Iterable[Blob]) -> None:
        in_order = sorted((blob for blob in blobs if blob.nbytes), key=lambda blob: blob.offset)
        for before, after in pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                self.refuse(f"tensors {before.name} and {after.name} overlap; {DAMAGED}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 80 else text[:77] + "..."
