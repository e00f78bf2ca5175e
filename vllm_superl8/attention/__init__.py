# SPDX-License-Identifier: BSD-3-Clause
"""The attention backend SUPERL8: a paged KV cache, in floating point or quantised, read by our kernels."""

BACKEND_NAME = "SUPERL8"
BACKEND_PATH = "vllm_superl8.attention.backend.Superl8AttentionBackend"


def backend_path(kv_cache_dtype: str | None) -> str:
    """Class path of the backend for a --kv-cache-dtype: one class for floating point and one a quantised format.

    Raises ValueError for a name that the backend does not take.
    """
    from vllm_superl8.attention.kv_cache import quantized_layout

    layout = quantized_layout(kv_cache_dtype)
    return BACKEND_PATH if layout is None else f"{BACKEND_PATH}_{layout.name}"


def register() -> None:
    """Make ``--attention-backend SUPERL8`` known to vLLM. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
