# SPDX-License-Identifier: BSD-3-Clause
"""The configuration and tokenizer files inside a ``.superl8`` file, as a folder in a cache.

The folder is named by the hash of the file's header.
"""

import json
import re
from pathlib import Path

from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError
from vllm_superl8.checkpoint.whole_folder import whole_folder

CACHE = Path.home() / ".cache" / "superl8" / "container"

SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names that stay inside the folder."""


def snapshot(file: Superl8File, cache: Path | None = None) -> Path:
    """Folder with config.json, which comes from __meta__ in files without their own, and all files of the container.

    cache   where folders are kept, ~/.cache/superl8/container unless given

    Raises ContainerError for a file without configuration and for names that would leave the folder, OSError where the
    cache cannot be written.
    """
    header, cache = file.header, CACHE if cache is None else cache
    folder = cache / f"{re.sub(r'[^A-Za-z0-9._-]', '_', header.path.stem)}-{header.digest[:16]}"
    if folder.is_dir():
        return folder
    for name in header.files:
        if not SAFE_NAME.fullmatch(name):
            raise ContainerError(f"{header.path}: it holds a file called {name!r}, wanted a plain name")
    config = header.meta.get("config")
    if "config.json" not in header.files and not (isinstance(config, dict) and "model_type" in config):
        raise ContainerError(f"{header.path}: there is no model configuration in it; convert the model again")
    with whole_folder(folder, header.path.name) as unfinished:
        for name in header.files:
            (unfinished / name).write_bytes(file.file(name))
        if "config.json" not in header.files:
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
