# SPDX-License-Identifier: BSD-3-Clause
"""What build.py works with: the compiler, files of installed wheels, and a cache of what was made before."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
CACHE_DAYS = 30


class BuildError(Exception):
    """Stops the build; the message says what is wrong and what to do."""


def wheel_file(dist: str, path: str) -> Path:
    """A file of an installed build requirement. Raises BuildError with the command that installs it."""
    try:
        found = Path(str(importlib.metadata.distribution(dist).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not found.exists():
        requires = tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"]
        wanted = " ".join(f"'{name}'" for name in requires)
        what = f"{dist} is not installed" if found is None else f"{dist} has no {path}"
        raise BuildError(f"{what}. Build with `pip install .`, or install what it uses: pip install {wanted}")
    return found


def gxx() -> str:
    """The host compiler: $CXX or g++. Raises BuildError if there is none."""
    name = os.environ.get("CXX", "g++")
    if not shutil.which(name.split()[0]):
        raise BuildError(
            f"the C++ compiler {name!r} is not on PATH. Install it (Debian, Ubuntu: apt-get install g++), or set "
            "SUPERL8_PURE_PYTHON=1 for a package without kernels, which runs everything through torch"
        )
    return name


def run(command: list[str], what: str) -> str:
    """Run a command and return its output. Raises BuildError with the command's own words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what} does not compile:\n{done.stderr or done.stdout}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout


def digest(*parts: str) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()


def cache_folder() -> Path:
    return Path(os.environ.get("SUPERL8_BUILD_CACHE") or Path.home() / ".cache" / "superl8" / "build")


@contextlib.contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Hold the lock of a cache entry; it ends with the process that holds it, however that ends."""
    with entry.with_name(f".lock-{entry.name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(key: str, make: Callable[[Path], None]) -> Path:
    """Folder of the cache entry `key`; `make(folder)` fills it if it is new. Of parallel builds one makes it."""
    entry = cache_folder() / key
    entry.parent.mkdir(parents=True, exist_ok=True)
    if not entry.exists():
        with _alone(entry), tempfile.TemporaryDirectory(dir=entry.parent, prefix=".new-") as work:
            fresh = Path(work) / "entry"
            fresh.mkdir()
            if not entry.exists():
                make(fresh)
                fresh.rename(entry)
    os.utime(entry)
    return entry


def prune_cache() -> None:
    limit = time.time() - CACHE_DAYS * 86400
    for entry in cache_folder().iterdir():
        if entry.stat().st_mtime >= limit:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:  # a lock
            entry.unlink(missing_ok=True)


def inclusion(source: Path, folders: list[Path]) -> Iterator[str]:
    """Text of a source file and of every project file that it includes, each once."""
    pending, seen = [source], set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text()
        yield f"{path.name}\0{text}"
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE):
            found = [folder / name for folder in (path.parent, *folders) if (folder / name).exists()]
            pending += found[:1]


def compile_object(source: Path, flags: list[str], keep_lines: bool = False) -> Path:
    """Object file of one C++ (or .cu, for the emulator) source, keyed by its preprocessed text.

    keep_lines  also let line numbers into the key, for objects with debug information
    """
    compiler = gxx()
    command = [*compiler.split(), "-std=c++17", "-fPIC", "-x", "c++", *flags]
    text = run([*command, "-E", *([] if keep_lines else ["-P"]), str(source)], str(source.name))
    shared_flags = [flag for flag in flags if not flag.startswith("-I")]
    compiler_version = run([*compiler.split(), "--version"], compiler)
    key = digest(text, *shared_flags, compiler_version)
    entry = cached(
        f"object-{source.stem}-{key[:32]}",
        lambda folder: run([*command, "-c", str(source), "-o", str(folder / "object.o")], source.name) and None,
    )
    return entry / "object.o"
