# SPDX-License-Identifier: BSD-3-Clause
"""The configuration and tokenizer files inside a ``.superl8`` file, as a folder in a cache.

The folder is named by the hash of the file's header, written under another name and renamed when it is whole.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError

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
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=".unfinished-"))
    except OSError as error:
        raise OSError(f"{cache} must be writable: {header.path.name} gets its config.json there ({error})") from error
    try:
        for name in header.files:
            (unfinished / name).write_bytes(file.file(name))
        if "config.json" not in header.files:
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its folder is the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
