# SPDX-License-Identifier: BSD-3-Clause
"""Which tensors a folder of safetensors files holds, from their headers, every number checked against the file.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, the tensors' bytes).
The library checks a file too, but says neither which tensor is cut off nor which file of the index is not there.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    dtype  as safetensors names it, such as "BF16", "I32" or "F8_E4M3"
    file   that holds it
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"

    def expect(self, shape: tuple[int, ...], why: str, dtypes: tuple[str, ...] = ()) -> "Stored":
        """Itself. Raises ValueError naming the tensor if its shape or dtype is another; `why` says whence they come."""
        if self.shape != shape:
            raise ValueError(f"{self} has shape {list(self.shape)}, wanted {list(shape)} ({why})")
        if dtypes and self.dtype not in dtypes:
            raise ValueError(f"{self} is {self.dtype}, wanted {' or '.join(dtypes)} ({why})")
        return self


def read_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of all files of the checkpoint in `folder`, by name.

    Raises ValueError, naming file and tensor, for files that are missing, cut short or damaged, and if there are none.
    """
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) > 1:  # Mistral publishes the same weights a second time under its own names
            files = [file for file in files if not file.name.startswith("consolidated")]
        if not files:
            raise ValueError(f"{folder}: no .safetensors file; superl8 reads quantised checkpoints from these only")
        return {name: stored for file in files for name, stored in read_file(file).items()}
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    read: dict[str, dict[str, Stored]] = {}
    for name, file in places.items():
        if file not in read:
            if not (folder / file).exists():
                raise ValueError(f"{folder / file}: the file is missing, it holds tensor {name} according to {INDEX}")
            read[file] = read_file(folder / file)
        if name not in read[file]:
            raise ValueError(f"{folder / file}: tensor {name} is missing, which {INDEX} says is there")
    return {name: read[file][name] for name, file in places.items()}


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises ValueError for one that is damaged or shorter than its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: no safetensors file, or cut short in its header; fetch it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: its header is no JSON ({error}); fetch it again") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        end = _end(entry)
        if end is None:
            raise ValueError(f"{path}: the header's entry of tensor {name} is damaged; fetch the file again")
        if 8 + length + end > size:
            raise ValueError(
                f"{path}: tensor {name} ends {8 + length + end - size} bytes after the end of the file, which is cut "
                "short; fetch it again"
            )
        tensors[name] = Stored(name, entry["dtype"], tuple(entry["shape"]), path.name)
    return tensors


def _end(entry: Any) -> int | None:
    """Offset behind a tensor's bytes, None if the entry is not what an entry is."""
    if not isinstance(entry, dict):
        return None
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    if not (isinstance(entry.get("dtype"), str) and isinstance(shape, list) and isinstance(offsets, list)):
        return None
    if len(offsets) != 2 or not all(isinstance(number, int) and number >= 0 for number in (*offsets, *shape)):
        return None
    return offsets[1] if offsets[0] <= offsets[1] else None
