# SPDX-License-Identifier: BSD-3-Clause
"""One op, one name, its implementations: reference, fake and kernel.

``register`` defines ``torch.ops.superl8.<name>``. CPU tensors take the torch reference, which is the op's
definition. CUDA tensors take the kernel; where there is none to take (pure-Python install, extension that does not
load, SUPERL8_DISABLE_KERNELS=1) they take the reference, and the log says so once with the reason. The fake gives
shapes and dtypes to tracing (torch.compile). This is the only file that imports the compiled module.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from vllm_superl8 import envs

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("superl8", "DEF")

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Names of the storage types in kernel symbols."""


@dataclass(frozen=True)
class Op:
    """A registered op.

    schema     torch schema without the name, mutated arguments marked
    reference  plain torch, any device; the definition
    fake       output shapes and dtypes only
    kernel     kernel(module, *args): same arguments, run by the compiled module (or by the tests' emulator)
    """

    name: str
    schema: str
    reference: Callable
    fake: Callable
    kernel: Callable | None


OPS: dict[str, Op] = {}


def _load() -> tuple[ModuleType | None, str]:
    if envs.disable_kernels():
        return None, "SUPERL8_DISABLE_KERNELS=1"
    try:
        from vllm_superl8 import _C
    except ImportError as error:
        return None, f"vllm_superl8._C does not import: {error}"
    reason = _stale(_C.build_info()["source_hash"])
    return (None, reason) if reason else (_C, "")


def _stale(built_from: str) -> str:
    """In a checkout: why an extension built from sources of this hash is not to be used, or "". Installed: ""."""
    root = Path(__file__).resolve().parents[2]
    path = root / "csrc" / "build.py"
    if not path.exists() or not (root / "pyproject.toml").exists():
        return ""
    spec = importlib.util.spec_from_file_location("superl8_build", path)
    build = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    now = build.source_hash()
    if now == built_from:
        return ""
    return f"vllm_superl8._C is stale: made from sources {built_from}, csrc/ is {now}; run python csrc/build.py"


COMPILED, NO_KERNELS_REASON = _load()
"""The compiled module or None, and why there is none."""


def register(name: str, schema: str, *, reference: Callable, fake: Callable, kernel: Callable | None) -> Callable:
    """Define ``superl8::<name>`` and return the callable.

    kernel=None means that the reference is made of torch ops that are already the fast way on a GPU.
    Raises ValueError if the name is taken.
    """
    if name in OPS:
        raise ValueError(f"ops: superl8::{name} is registered twice")
    OPS[name] = Op(name, schema, reference, fake, kernel)
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, _on_cuda(OPS[name]), "CUDA")
    torch.library.register_fake(f"superl8::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.superl8, name).default


def _on_cuda(op: Op) -> Callable:
    if op.kernel is None:
        return op.reference
    if COMPILED is not None:
        return lambda *args, **kwargs: op.kernel(COMPILED, *args, **kwargs)
    said = False

    def fall_back(*args, **kwargs):
        nonlocal said
        if not said:
            said = True
            logger.warning("superl8::%s runs its slow torch reference on the GPU: %s", op.name, NO_KERNELS_REASON)
        return op.reference(*args, **kwargs)

    return fall_back


def dtype_name(tensor: torch.Tensor, op: str) -> str:
    """Kernel-symbol name of a tensor's storage type. Raises TypeError for one that no kernel takes."""
    if tensor.dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: got {tensor.dtype}, wanted one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[tensor.dtype]


def stream(tensor: torch.Tensor) -> int:
    """Handle of the CUDA stream to launch on; 0 for CPU tensors (the emulator)."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def ptr(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """tensor (..., n) as (rows, n) with contiguous rows, which may be strided; copied only if it has to be."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
