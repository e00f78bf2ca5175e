# SPDX-License-Identifier: BSD-3-Clause
"""Writes ``.superl8`` files a blob at a time, under another name until they are whole; an interrupted one goes on.

Beside FILE.partial, which holds the blobs, FILE.partial.journal gets a line for each blob that is written. With a
resume_key a later writer of the same key checks these blobs by their CRC and continues behind the last good one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_superl8.checkpoint.superl8_header import ContainerError, read_header
from vllm_superl8.formats.container import (
    ALIGN,
    DESCRIPTION,
    DTYPE_NAMES,
    FILES,
    FIXED,
    FOOTER_MAGIC,
    MAGIC,
    META,
)

COPY_BYTES = 1 << 24


class Superl8Writer:
    """A context manager: leaving it without an error gives the file its name, with one leaves what it can resume from.

    path        of the finished file; an existing one is replaced at the end
    variant     "footer": written in one pass. "front": the blobs are copied once more, behind the header
    resume_key  text that names source and options; None never resumes and leaves nothing behind after an error

    Raises ContainerError for a wrong call and where another process writes the same file, OSError where the disk does.
    """

    def __init__(self, path: Path | str, variant: str = "footer", resume_key: str | None = None):
        if variant not in ("footer", "front"):
            raise ContainerError(f"{path}: there is no variant {variant!r}; choose footer or front")
        self.path, self.variant, self.resume_key = Path(path), variant, resume_key
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.journal_path = self.path.with_name(self.path.name + ".partial.journal")
        self.rows: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.meta: dict[str, Any] = {}
        self.provenance: Any = {}
        self.pp_stages: Sequence[Sequence[str]] = ()
        self.experts: dict[str, list[str]] = {}

    def __enter__(self) -> "Superl8Writer":
        self._file = self.partial.open("r+b" if self.partial.exists() else "w+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ContainerError(f"{self.partial}: another process writes it; wait for that one") from error
        kept = self._resume() if self.resume_key is not None else []
        end = max((ALIGN + row["offset"] + row["nbytes"] for _, _, row in kept), default=0)
        self._file.truncate(end)
        self._journal = self.journal_path.open("w")
        self._log({"key": self.resume_key})
        if end == 0:
            self._file.seek(0)
            self._file.write((MAGIC + bytes(8)).ljust(ALIGN, b"\0"))
        for table, name, row in kept:
            self._note(table, name, row)
        self._file.seek(0, os.SEEK_END)
        return self

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is written already."""
        return name in self.rows

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        scheme: str = "raw",
        *,
        scale: str | None = None,
        group_size: int | None = None,
        codebook: str | None = None,
        recipe: Any = None,
    ) -> None:
        """Write a tensor's elements; its scales are a tensor of their own, named by `scale`.

        Raises ContainerError for a name that is there and for a dtype that the format does not have.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise ContainerError(
                f"{self.path}: tensor {name} is {tensor.dtype}, wanted {', '.join(DTYPE_NAMES.values())}"
            )
        if name in self.rows:
            raise ContainerError(f"{self.path}: tensor {name} is written already")
        stored = tensor.detach().cpu().contiguous()
        data = memoryview(stored.view(-1).view(torch.uint8).numpy()) if stored.numel() else memoryview(b"")
        row = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        row |= self._write(data)
        row |= {"scheme": scheme, "scale": scale, "rotated": False, "hadamard_dim": None, "smoothed": False}
        row |= {"group_size": group_size, "codebook": codebook, "recipe": recipe}
        self._note("rows", name, row)

    def add_file(self, name: str, content: bytes) -> None:
        """Write a tokenizer or configuration file, unless it is there from an interrupted call."""
        if name in self.files:
            return
        row = {"dtype": "uint8", "shape": [len(content)], **self._write(memoryview(content)), "scheme": "raw"}
        self._note("files", name, row)

    def __exit__(self, kind, error, traceback) -> None:
        with contextlib.closing(self._file), contextlib.closing(self._journal):
            try:
                if kind is None:
                    self._finish()
            finally:
                if self.resume_key is None:
                    self.partial.unlink(missing_ok=True)
                    self.journal_path.unlink(missing_ok=True)

    def _write(self, data: memoryview) -> dict[str, int]:
        end = self._file.tell()
        at = -(-end // ALIGN) * ALIGN
        self._file.write(bytes(at - end))
        self._file.write(data)
        return {"offset": at - ALIGN, "nbytes": data.nbytes, "crc32": zlib.crc32(data)}

    def _note(self, table: str, name: str, row: dict[str, Any]) -> None:
        """Count a blob as written: first its bytes leave this process, then its line."""
        self._file.flush()
        getattr(self, table)[name] = row
        self._log({"table": table, "name": name, "row": row})

    def _log(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _resume(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(table, name, row) of the blobs of an interrupted writer that are whole, up to the first that is not."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            lines = self.journal_path.read_text().splitlines()
            if json.loads(lines[0])["key"] != self.resume_key:
                return []
            kept = []
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the last line may be cut short
                for line in map(json.loads, lines[1:]):
                    row = line["row"]
                    if not self._is_whole(row):
                        break
                    kept.append((line["table"], line["name"], row))
            return kept
        return []

    def _is_whole(self, row: dict[str, Any]) -> bool:
        self._file.seek(ALIGN + row["offset"])
        left, crc = row["nbytes"], 0
        while left and (data := self._file.read(min(left, COPY_BYTES))):
            crc, left = zlib.crc32(data, crc), left - len(data)
        return left == 0 and crc == row["crc32"]

    def _header(self) -> bytes:
        shards = {"pp_stages": [list(stage) for stage in self.pp_stages], "experts": self.experts}
        meta = {**self.meta, FILES: self.files} if self.files else self.meta
        header = {
            **DESCRIPTION,
            **FIXED,
            "provenance": self.provenance,
            "tensors": self.rows,
            "shards": shards,
            META: meta,
        }
        return json.dumps(header).encode()

    def _finish(self) -> None:
        header = self._header()
        if self.variant == "footer":
            at = self._file.tell()
            self._file.write(header + struct.pack("<QQ8s", at, len(header), FOOTER_MAGIC))
            self._settle(self._file, self.partial)
        else:
            front = self.partial.with_suffix(".front")
            with front.open("w+b") as file:
                start = MAGIC + struct.pack("<Q", len(header)) + header
                file.write(start.ljust(-(-len(start) // ALIGN) * ALIGN, b"\0"))
                self._file.seek(ALIGN)
                shutil.copyfileobj(self._file, file, COPY_BYTES)
                self._settle(file, front)
            self.partial.unlink()
        self.journal_path.unlink()

    def _settle(self, file, partial: Path) -> None:
        """Bring a whole file to the disk, check its header as a reader does and give it its name."""
        file.flush()
        os.fsync(file.fileno())
        read_header(partial)
        os.replace(partial, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
