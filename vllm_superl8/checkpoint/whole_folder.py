# SPDX-License-Identifier: BSD-3-Clause
"""Folders of a cache that are there whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(folder: Path, wanted_by: str) -> Iterator[Path]:
    """A new folder to fill, renamed to `folder` at the end; where another process was faster, its folder stays.

    wanted_by  name of the model, for the message

    Raises OSError where the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    except OSError as error:
        raise OSError(f"{folder.parent} must be writable: {wanted_by} gets its config.json there ({error})") from error
    try:
        yield unfinished
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
