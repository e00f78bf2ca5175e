# SPDX-License-Identifier: BSD-3-Clause
"""A Hugging Face checkpoint in a folder: its tensors one at a time, and the files beside them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_superl8.checkpoint.superl8_header import ContainerError

INDEX = "model.safetensors.index.json"

BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "tekken.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files that a server needs beside the weights."""


class HfFolder:
    """Raises ContainerError, naming the file, for missing parts and files that cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        self.config = self._json("config.json")
        self._parts = self._find_parts()
        self.files = sorted({file for pattern in BESIDE for file in path.glob(pattern) if file.is_file()})

    @property
    def fingerprint(self) -> str:
        """Changes when a file of the checkpoint does (by name, size and time)."""
        parts = sorted({*self._parts, *self.files})
        facts = [(part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def names(self) -> list[str]:
        """In the order of tensors(). Raises ContainerError for a name that is there twice."""
        names: dict[str, Path] = {}
        for part in self._parts:
            with self._open(part) as tensors:
                for name in tensors.keys():  # noqa: SIM118  (no mapping)
                    if name in names:
                        raise ContainerError(f"{part}: tensor {name} is in {names[name].name} too; fetch both again")
                    names[name] = part
        return list(names)

    def tensors(self, skip=()) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all tensors whose name is not in `skip`, each read when it is asked for."""
        for part in self._parts:
            with self._open(part) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name not in skip:
                        yield name, tensors.get_tensor(name)

    def _open(self, part: Path):
        try:
            return safe_open(part, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ContainerError(f"{part}: it cannot be read as safetensors ({error}); fetch it again") from error

    def _find_parts(self) -> list[Path]:
        if (self.path / INDEX).is_file():
            names = self._json(INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise ContainerError(f"{self.path / INDEX}: it has no weight_map; fetch it again")
            parts = [self.path / name for name in sorted(set(names.values()))]
        else:
            parts = sorted(self.path.glob("*.safetensors"))
        if not parts:
            raise ContainerError(f"{self.path}: there are no .safetensors files in it; only these are converted")
        if missing := next((part for part in parts if not part.is_file()), None):
            raise ContainerError(f"{missing}: it is named in {INDEX} and missing; fetch it")
        return parts

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ContainerError(f"{self.path / name}: it cannot be read ({error})") from error
        if not isinstance(content, dict):
            raise ContainerError(f"{self.path / name}: it is no JSON object")
        return content
