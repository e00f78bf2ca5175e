# SPDX-License-Identifier: BSD-3-Clause
"""What ``superl8 convert`` and ``superl8 verify`` read: a Hugging Face folder or a GGUF file, under the same names."""

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_superl8.checkpoint.gguf_header import MAGIC, read_model
from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.checkpoint.hf_folder import HfFolder
from vllm_superl8.checkpoint.superl8_header import ContainerError


class Source(Protocol):
    """A 16-bit model.

    config        config.json
    files         files that a server needs beside the weights
    fingerprint   changes when the model does
    group_size    that its weights are best quantised with (-1: one scale a row)
    """

    path: Path
    config: dict[str, Any]
    files: list[Path]
    fingerprint: str
    group_size: int

    def count(self) -> int:
        """Number of tensors."""

    def tensors(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor) of all tensors that are not in `skip`, each read when it is asked for."""


class _Folder:
    group_size = -1

    def __init__(self, path: Path):
        self._folder = HfFolder(path)
        self.path, self.config, self.files = path, self._folder.config, self._folder.files
        self.fingerprint = self._folder.fingerprint
        quantised = self.config.get("quantization_config")
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ContainerError(f"{path}: it is quantised already ({method}); take the 16-bit checkpoint")

    def count(self) -> int:
        return len(self._folder.names())

    def tensors(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        return self._folder.tensors(skip)


class _Gguf:
    group_size = 128

    def __init__(self, path: Path, blocks: bool):
        # Here, because they import transformers and vLLM, which takes long and folders do not need.
        from vllm_superl8.checkpoint.gguf_config import config_dict, hf_config
        from vllm_superl8.checkpoint.gguf_snapshot import snapshot
        from vllm_superl8.quant.gguf.weights import check, weights

        self.path, self.blocks, self._weights = path, blocks, weights
        self._header = read_model(path)
        self._config = hf_config(self._header, config_dict(self._header))
        folder = snapshot(self._header, lambda config: check(self._header, config))
        self.config = json.loads((folder / "config.json").read_text())
        self.files = sorted(folder.iterdir())
        self.fingerprint = hashlib.sha256(
            f"{self._header.digest} {path.stat().st_size} {path.stat().st_mtime_ns}".encode()
        ).hexdigest()
        self._dtype = getattr(torch, self.config["dtype"])

    def count(self) -> int:
        experts = self.config.get("num_experts") or 1
        return sum(experts if "_exps." in name else 1 for name in self._header.tensors)

    def tensors(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._weights(self._header, self._config, self._dtype, in_blocks=self.blocks):
            if name not in skip:
                yield name, value if self.blocks or not isinstance(value, StoredMatrix) else value.values()


def open_source(path: Path, blocks: bool = False) -> Source:
    """The model at `path`: a folder with config.json and safetensors, or a GGUF file.

    blocks   matrices of a GGUF file whose type has a kernel come as StoredMatrix, else their values

    Raises ContainerError or another ValueError in one line for what cannot be read.
    """
    if path.is_dir():
        return _Folder(path)
    if not path.is_file():
        raise ContainerError(f"{path}: there is no such file or folder")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ContainerError(f"{path}: it is no GGUF file; give one, or the folder of a Hugging Face checkpoint")
    return _Gguf(path, blocks)
