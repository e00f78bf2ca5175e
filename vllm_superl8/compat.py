# SPDX-License-Identifier: BSD-3-Clause
"""The versions of vLLM and torch that this package works with."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

SUPPORTED = {"vllm": SpecifierSet(">=0.33.0,<0.34"), "torch": SpecifierSet(">=2.10,<2.15")}

INSTALL = {
    "vllm": "VLLM_VERSION_OVERRIDE=0.33.0 VLLM_TARGET_DEVICE=empty pip install --no-build-isolation --no-binary vllm "
    "vllm==0.33.0",
    "torch": "pip install torch==2.10.0",
}


def problems() -> list[str]:
    """One sentence for each of vLLM and torch that is missing or outside its range, with the command that mends it."""
    found = []
    for name, wanted in SUPPORTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed; superl8 needs {name}{wanted}: {INSTALL[name]}")
            continue
        if not wanted.contains(version, prereleases=True):
            found.append(f"{name} {version} is installed; superl8 needs {name}{wanted}: {INSTALL[name]}")
    return found
