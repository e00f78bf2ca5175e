# SPDX-License-Identifier: BSD-3-Clause
"""The header of a GGUF file: metadata and tensor table, every number checked against the file before it is used.

Format: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3, little-endian.
``gguf.GGUFReader`` trusts its input (a wrong count makes it read garbage or run out of memory) and spends half a
minute on a vocabulary of 262144 tokens, so the header is read here, once, and a test compares the two.
"""

import hashlib
import mmap
import os
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
"""GGML_MAX_DIMS"""
MAX_NAME = 256
"""Characters of a key or tensor name; the longest in use have about 60."""
DEFAULT_ALIGNMENT = 32
SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""How llama.cpp's gguf-split names the parts of one model."""

DAMAGED = "the file is damaged or cut short; fetch it again"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""GGUF metadata value type to struct code."""
_SMALLEST_ENTRY_BYTES = 8 + 4 + 1
"""A metadata entry: length of an empty key, type, a one-byte value."""
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
"""A row of the tensor table: length of an empty name, number of dimensions, one dimension, type, offset."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    shape   as torch has it, outermost first; in values, not bytes
    type    how it is stored
    path    file that holds it
    offset  of its first byte in that file
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        values, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // values * block_bytes


@dataclass(frozen=True)
class Header:
    """What stands before the weights of a model, of all its files.

    path      the file, of a split model the first one
    metadata  key to number, bool, string or list of one of these, of the first file
    tensors   by name, in the order of the files
    digest    hexadecimal hash of all headers and file sizes
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str


def read_model(path: Path) -> Header:
    """The header of the model that a file belongs to: of that file, or of all files of a split model.

    Raises ValueError, in one line that names the file and the tensor or key, for everything that is not a whole GGUF
    model, and OSError for a file that cannot be read.
    """
    files = shards(path)
    digest = hashlib.sha256()
    headers = []
    tensors: dict[str, Tensor] = {}
    for file in files:
        header = read_file(file)
        if again := next((name for name in header.tensors if name in tensors), None):
            raise ValueError(f"{file}: tensor {again} is in {tensors[again].path.name} already; {DAMAGED}")
        tensors |= header.tensors
        digest.update(header.digest.encode())
        headers.append(header)
    first = headers[0]
    split_count = first.metadata.get("split.count", 1)
    if not isinstance(split_count, int):
        raise ValueError(f"{path}: split.count is {split_count!r}, a number was expected; {DAMAGED}")
    if len(files) != max(split_count, 1):
        raise ValueError(
            f"{path}: it is one of {split_count} files of a split model, whose names must end in "
            f"-00001-of-{split_count:05d}.gguf and so on; found {len(files)}"
        )
    return Header(first.path, first.metadata, tensors, digest.hexdigest())


def shards(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order; just `path` unless its name says that it is a part.

    Raises ValueError when a part is missing.
    """
    match = SHARD_NAME.search(path.name)
    if not match:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    if not 0 < int(match[1]) <= count:
        raise ValueError(f"{path}: part {match[1]} of {match[2]} cannot be; rename the file")
    files = [path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    if missing := next((file for file in files if not file.is_file()), None):
        raise ValueError(f"{path}: {missing.name} of the same model is missing beside it; fetch all {count} files")
    return files


def read_file(path: Path) -> Header:
    """The header of one file. Raises as read_model does."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise ValueError(f"{path}: it begins with {magic!r} and not with {MAGIC!r}, so it is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size).header()


class _Reader:
    """Walks a mapped header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self.data, self.size = path, data, size
        self.at = len(MAGIC)

    def header(self) -> Header:
        (version,) = self.numbers("I", 1, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian GGUF" if swapped in VERSIONS else f"GGUF version {version}"
            self.refuse(f"it is {kind}; little-endian GGUF of version 2 or 3 is read, convert the model again")
        tensor_count, entry_count = self.numbers("Q", 2, "the counts")
        self.bound(entry_count, _SMALLEST_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self.name("a metadata key")
            if key in metadata:
                self.refuse(f"metadata key {key} is there twice; {DAMAGED}")
            metadata[key] = self.value(key)
        self.bound(tensor_count, _SMALLEST_TENSOR_BYTES, "tensors")
        table = [self.tensor() for _ in range(tensor_count)]
        start = self.data_start(metadata)
        digest = hashlib.sha256(self.data[: self.at] + self.size.to_bytes(8, "little")).hexdigest()
        return Header(self.path, metadata, self.placed(table, start, metadata), digest)

    def refuse(self, why: str):
        raise ValueError(f"{self.path}: {why}")

    def bound(self, count: int, smallest_bytes: int, what: str) -> None:
        if count * smallest_bytes > self.size - self.at:
            self.refuse(f"{count} {what} cannot fit in its {self.size} bytes; {DAMAGED}")

    def numbers(self, code: str, count: int, what: str) -> tuple:
        """`count` numbers of a struct code."""
        end = self.at + count * struct.calcsize("<" + code)
        if end > self.size:
            self.refuse(f"{what} would end at byte {end} of {self.size}; {DAMAGED}")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at = end
        return values

    def string(self, what: str) -> str:
        (length,) = self.numbers("Q", 1, what)
        end = self.at + length
        if end > self.size:
            self.refuse(f"{what} would end at byte {end} of {self.size}; {DAMAGED}")
        try:
            text = self.data[self.at : end].decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} at byte {self.at} is not UTF-8; {DAMAGED}")
        self.at = end
        return text

    def name(self, what: str) -> str:
        """A string that may stand in a message: short and printable."""
        name = self.string(what)
        if len(name) > MAX_NAME or not name.isprintable():
            self.refuse(f"{what} begins with {name[:40]!r}, printable text of up to {MAX_NAME} characters was expected")
        return name

    def value(self, key: str) -> Any:
        (kind,) = self.numbers("I", 1, f"metadata {key}")
        if kind == _STRING:
            return self.string(f"metadata {key}")
        if kind in _SCALARS:
            return self.scalars(kind, 1, key)[0]
        if kind != _ARRAY:
            self.refuse(f"metadata {key} has type {kind}, which GGUF does not know; {DAMAGED}")
        (kind,) = self.numbers("I", 1, f"metadata {key}")
        (count,) = self.numbers("Q", 1, f"metadata {key}")
        if kind in _SCALARS:
            self.bound(count, struct.calcsize("<" + _SCALARS[kind]), f"values of metadata {key}")
            return self.scalars(kind, count, key)
        if kind != _STRING:
            self.refuse(f"metadata {key} is an array of type {kind}; arrays of numbers and of strings are read")
        self.bound(count, 8, f"values of metadata {key}")
        what = f"a value of metadata {key}"
        return [self.string(what) for _ in range(count)]

    def scalars(self, kind: int, count: int, key: str) -> list:
        values = self.numbers(_SCALARS[kind], count, f"metadata {key}")
        return [bool(value) for value in values] if kind == _BOOL else list(values)

    def tensor(self) -> tuple:
        """(name, shape, type, offset from the start of the weights) of the next row of the table."""
        name = self.name("a tensor name")
        (dims,) = self.numbers("I", 1, f"tensor {name}")
        if not 1 <= dims <= MAX_DIMS:
            self.refuse(f"tensor {name} has {dims} dimensions, 1 to {MAX_DIMS} are possible; {DAMAGED}")
        shape = self.numbers("Q", dims, f"tensor {name}")[::-1]
        (number,) = self.numbers("I", 1, f"tensor {name}")
        (offset,) = self.numbers("Q", 1, f"tensor {name}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self.refuse(
                f"tensor {name} has GGUF type {number}, which the installed gguf package does not know; upgrade gguf "
                "or take the model in another quantisation"
            )
        return name, shape, kind, offset

    def data_start(self, metadata: dict[str, Any]) -> int:
        """Byte at which the weights begin."""
        alignment = self.alignment(metadata)
        return -(-self.at // alignment) * alignment

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            self.refuse(f"general.alignment is {alignment!r}, a multiple of 8 was expected; {DAMAGED}")
        return alignment

    def placed(self, table: list[tuple], start: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors, each whole blocks, aligned, inside the file and apart from the others."""
        alignment = self.alignment(metadata)
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                self.refuse(f"tensor {name} is there twice; {DAMAGED}")
            tensor = Tensor(name, shape, kind, self.path, start + offset)
            what = f"tensor {name} of shape {list(shape)} and type {kind.name}"
            values = GGML_QUANT_SIZES[kind][0]
            if min(shape) < 1 or shape[-1] % values:
                self.refuse(f"{what}: no dimension may be 0 and rows hold whole blocks of {values} values; {DAMAGED}")
            if offset % alignment:
                self.refuse(f"{what} is at offset {offset}, not a multiple of {alignment}; {DAMAGED}")
            if tensor.offset + tensor.nbytes > self.size:
                end = tensor.offset + tensor.nbytes
                self.refuse(f"{what} would end at byte {end} of {self.size}; {DAMAGED}")
            tensors[name] = tensor
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                self.refuse(f"tensors {before.name} and {after.name} overlap; {DAMAGED}")
        return tensors
