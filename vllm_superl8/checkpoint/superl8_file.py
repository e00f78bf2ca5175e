# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a ``.superl8`` file as views of the mapped file: no copy beyond the page cache."""

import mmap
import threading
import zlib
from pathlib import Path

import torch

from vllm_superl8.checkpoint.superl8_header import DAMAGED, Blob, Container, ContainerError, read_header

CRC_CHUNK_BYTES = 1 << 24


class Superl8File:
    """An open file. Tensors stay valid as long as they are held, whether or not this object is.

    verify  check the CRC of each blob when it is first asked for

    Raises ContainerError for a file that is damaged or of another format, OSError for one that cannot be read.
    """

    def __init__(self, path: Path | str, verify: bool = True):
        self.header: Container = read_header(Path(path))
        self.verify = verify
        self._verified: set[int] = set()
        self._lock = threading.Lock()
        with self.header.path.open("rb") as file:
            # ACCESS_COPY: torch wants writable memory; a write, which nothing here does, would never reach the file.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> torch.Tensor:
        """The stored elements of a tensor. Raises ContainerError for an unknown name and a wrong CRC."""
        if name not in self.header.tensors:
            raise ContainerError(f"{self.header.path}: there is no tensor {name}")
        return self._view(self.header.tensors[name])

    def scales(self, name: str) -> torch.Tensor:
        """The scales of a tensor as (rows, groups) float32; one group for schemes with a scale a row."""
        blob = self.header.tensors[name]
        if blob.scale is None:
            raise ContainerError(f"{self.header.path}: tensor {name} of scheme {blob.scheme} has no scales")
        return self.tensor(blob.scale).view(blob.shape[0], -1)

    def file(self, name: str) -> bytes:
        """The content of a tokenizer or configuration file. Raises as tensor() does."""
        if name not in self.header.files:
            raise ContainerError(f"{self.header.path}: there is no file {name} in it")
        return bytes(self._view(self.header.files[name]).numpy())

    def check(self, blob: Blob) -> None:
        """Compare a blob with its CRC. Raises ContainerError when they differ; a blob without one passes."""
        crc = 0
        end = blob.offset + blob.nbytes
        with memoryview(self._data) as data:
            for at in range(blob.offset, end, CRC_CHUNK_BYTES):
                crc = zlib.crc32(data[at : min(at + CRC_CHUNK_BYTES, end)], crc)
        if blob.crc32 is not None and crc != blob.crc32:
            raise ContainerError(
                f"{self.header.path}: tensor {blob.name} has CRC {crc:08x}, its header says {blob.crc32:08x}; {DAMAGED}"
            )

    def _view(self, blob: Blob) -> torch.Tensor:
        if blob.nbytes == 0:
            return torch.empty(blob.shape, dtype=blob.dtype)
        with self._lock:
            if self.verify and blob.offset not in self._verified:
                self.check(blob)
                self._verified.add(blob.offset)
        count = blob.nbytes // blob.dtype.itemsize
        return torch.frombuffer(self._data, dtype=blob.dtype, count=count, offset=blob.offset).view(blob.shape)
