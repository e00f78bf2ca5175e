# SPDX-License-Identifier: BSD-3-Clause
"""The files that a Hugging Face checkpoint has beside its weights, made from a GGUF file and kept in a cache.

A folder is named by the hash of everything that it follows from: the headers of the model's files and the versions
of the packages that convert them.
"""

import hashlib
import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_superl8.checkpoint.gguf_config import config_dict, generation_dict, hf_config
from vllm_superl8.checkpoint.gguf_header import Header
from vllm_superl8.checkpoint.gguf_tokenizer import write_tokenizer
from vllm_superl8.checkpoint.whole_folder import whole_folder

CACHE = Path.home() / ".cache" / "superl8" / "gguf"

REVISION = 1
"""Raised when this package converts differently."""

PACKAGES = ("transformers", "gguf", "vllm-gguf-plugin")


def snapshot(header: Header, check: Callable[[Any], None], tokenizer: bool = True, cache: Path | None = None) -> Path:
    """Folder with config.json, generation_config.json and the tokenizer of the model.

    check      called with transformers' configuration object before the folder is made; what it raises is passed on
    tokenizer  False leaves the tokenizer out, for a file whose tokenizer is not wanted or cannot be read
    cache      where folders are kept, ~/.cache/superl8/gguf unless given

    Raises ValueError for a file that cannot be served (see gguf_config and gguf_tokenizer) and OSError where the
    cache cannot be written.
    """
    cache = CACHE if cache is None else cache
    folder = cache / (_name(header) + ("" if tokenizer else "-no-tokenizer"))
    if folder.is_dir():
        return folder
    config = hf_config(header, config_dict(header))
    check(config)
    with whole_folder(folder, header.path.name) as unfinished:
        if tokenizer:
            write_tokenizer(header, unfinished)
        _write_json(unfinished / "config.json", config.to_dict())
        _write_json(unfinished / "generation_config.json", generation_dict(header))
    return folder


def _name(header: Header) -> str:
    versions = [f"{package} {metadata.version(package)}" for package in PACKAGES]
    key = hashlib.sha256("\n".join([str(REVISION), header.digest, *versions]).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', header.path.stem)}-{key[:16]}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
