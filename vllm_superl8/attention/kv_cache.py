# SPDX-License-Identifier: BSD-3-Clause
"""KV cache formats as vLLM sees them: names for --kv-cache-dtype, storage dtype, bytes a token."""

import torch

from vllm_superl8.formats.layout import KV_LAYOUTS, KVLayout

FLOAT_NAMES = {"auto", "float16", "bfloat16"}
"""KV cache dtypes that vLLM knows and that store floating point."""


def supported_names() -> list[str]:
    """Every --kv-cache-dtype that the backend takes."""
    return sorted(FLOAT_NAMES | {name for name, layout in KV_LAYOUTS.items() if layout.quantized})


def quantized_layout(kv_cache_dtype: str | None) -> KVLayout | None:
    """The layout of a quantised cache, None for a floating-point one.

    Raises ValueError for a name that the backend does not take.
    """
    if kv_cache_dtype in (None, *FLOAT_NAMES):
        return None
    if kv_cache_dtype not in supported_names():
        raise ValueError(f"--kv-cache-dtype {kv_cache_dtype}: superl8 takes {', '.join(supported_names())}")
    return KV_LAYOUTS[kv_cache_dtype]


def register() -> None:
    """Tell vLLM the quantised names that it does not know. Idempotent."""
    from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    for dtype_name in supported_names():
        if dtype_name in KV_CACHE_DTYPES:
            continue

        class Handler:
            name = dtype_name

            def torch_dtype(self) -> torch.dtype:
                return torch.int8

            def quant_mode(self) -> KVQuantMode:
                return KVQuantMode.CUSTOM

        register_kv_cache_dtype(dtype_name)(Handler)
