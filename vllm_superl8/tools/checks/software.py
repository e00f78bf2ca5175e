# SPDX-License-Identifier: BSD-3-Clause
"""vLLM, torch, our extension, Triton, compilers: what is installed and whether it fits."""

import importlib
import importlib.util
import os
import platform
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from vllm_superl8 import compat
from vllm_superl8.tools.checks import Finding


def versions() -> list[Finding]:
    """vLLM and torch against the declared ranges."""
    if problems := compat.problems():
        return [Finding("versions", "broken", *problem.split(": ", 1)) for problem in problems]
    installed = ", ".join(f"{name} {metadata.version(name)}" for name in compat.SUPPORTED)
    return [Finding("versions", "ok", f"{installed}, Python {platform.python_version()}")]


def vllm_extensions() -> list[str]:
    """Names of the compiled modules that vLLM brought along; empty for its empty build."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return sorted({path.name.split(".")[0] for folder in folders for path in Path(folder).glob("*.so")})


def vllm_build(target: str) -> list[Finding]:
    """Whether vLLM is the empty build, and if not, whether its extensions load."""
    modules = vllm_extensions()
    if not modules:
        if target == "stock":
            return [Finding("vllm", "broken", "vLLM is its empty build, without kernels", "pip install vllm==0.33.0")]
        return [Finding("vllm", "ok", "empty build: no compiled extensions, superl8 stands in for them")]
    refused = [reason for name in modules if (reason := _import_error(f"vllm.{name}"))]
    text = f"vLLM has compiled extensions ({', '.join(modules)})"
    if refused:
        text += f", which do not load ({refused[0]})"
    if target == "stock":
        return [Finding("vllm", "broken" if refused else "ok", text)]
    advice = f"superl8 is tested with the empty build only: {compat.INSTALL['vllm']}"
    return [Finding("vllm", "slow", text, advice)]


def platform_class() -> list[Finding]:
    """Which platform vLLM itself resolves, which is what will serve."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm.platforms import current_platform

        resolved = type(current_platform)
    except Exception as error:  # whatever stops vLLM from starting is the finding
        return [Finding("platform", "broken", f"vLLM does not start: {type(error).__name__}: {error}")]
    if resolved.__module__.startswith("vllm_superl8."):
        return [Finding("platform", "ok", f"vLLM runs on {resolved.__name__}")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "superl8" not in allowed.split(","):
        return [
            Finding(
                "platform",
                "broken",
                f"VLLM_PLUGINS={allowed} keeps superl8 out",
                f"unset it, or VLLM_PLUGINS={allowed},superl8",
            )
        ]
    return [
        Finding(
            "platform",
            "broken",
            f"vLLM resolved {resolved.__module__}.{resolved.__name__} instead of superl8's",
            "reinstall the package, so that its entry points are registered: pip install --force-reinstall --no-deps .",
        )
    ]


def extension(target: str) -> list[Finding]:
    """The compiled kernels: loaded or why not, for which architectures, of which sources."""
    from vllm_superl8.ops import registry

    if registry.COMPILED is None:
        if target == "cpu":
            text = f"no compiled kernels ({registry.NO_KERNELS_REASON}); the CPU does not need them"
            return [Finding("kernels", "ok", text)]
        advice = "pip install --force-reinstall --no-deps . in the source folder; it needs g++"
        text = f"every op runs its slow torch reference: {registry.NO_KERNELS_REASON}"
        return [Finding("kernels", "slow", text, advice)]
    info = registry.COMPILED.build_info()
    text = f"{len(info['kernels'])} kernels in {len(info['images'])} images for {' '.join(info['archs'])}"
    return [Finding("kernels", "ok", text)]


def triton(target: str) -> list[Finding]:
    """Triton: present, and with a driver for this GPU."""
    reason = _triton_missing()
    if target == "cpu":
        state = "is not used on the CPU" if not reason else f"{reason}, and is not used on the CPU"
        return [Finding("triton", "ok", f"Triton {state}")]
    if not reason:
        return [Finding("triton", "ok", f"Triton {metadata.version('triton')} drives this GPU")]
    text = f"Triton {reason}: no torch.compile, and vLLM's own Triton kernels run as torch code"
    return [Finding("triton", "missing", text, "pip install triton==3.6.0 (it has sm_70)")]


def _triton_missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "is not installed"
    try:
        from triton.backends import backends

        active = [name for name, found in backends.items() if name != "cpu" and found.driver.is_active()]
    except Exception as error:  # a Triton that cannot start must not stop the doctor
        return f"does not start ({type(error).__name__}: {error})"
    return "" if active else f"{metadata.version('triton')} finds no GPU"


def compiler(target: str) -> list[Finding]:
    """The host compiler, which Triton and torch.compile call at run time."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), ""
    )
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if found and (headers or target == "cpu"):
        return [Finding("compiler", "ok", found)]
    absent = "no C++ compiler" if not found else "no Python.h"
    package = "g++" if not found else "python3-dev"
    use = "torch.compile" if target == "cpu" else "Triton, torch.compile and the build of the kernels"
    return [Finding("compiler", "missing", f"{absent}: {use} cannot work", f"apt-get install {package}")]


def _import_error(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # any failure of a foreign binary is the answer
        return f"{type(error).__name__}: {error}"
    return ""
