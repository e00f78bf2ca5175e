# SPDX-License-Identifier: BSD-3-Clause
"""Operators and modules that vLLM 0.33 takes from its compiled extensions and no seam avoids.

Each operator is a thin wrapper over one of ours or over plain torch. Where vLLM has a seam (CustomOp, IR providers,
Triton overrides, attention backends) that is used instead, and nothing stands here.
"""

import sys
import types

_EMPTY_MODULES = {
    # Imported at the top of vllm.platforms.cuda for the operators that it registers.
    "cuda": ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"),
    "cpu": (),
}

_installed = set()


def install(device: str) -> None:
    """Put the stand-ins for "cpu" or "cuda" in place. Idempotent; imports no vLLM module."""
    if device in _installed:
        return
    _installed.add(device)
    for name in _EMPTY_MODULES[device]:
        sys.modules.setdefault(name, types.ModuleType(name))

    from vllm_superl8.platform.stand_ins import cache, core, delta_rule, moe, named_only, recurrent

    for library in (core, moe, cache, recurrent, delta_rule, named_only):
        library.define(device)
