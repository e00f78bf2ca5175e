# SPDX-License-Identifier: BSD-3-Clause
"""The attention backend SUPERL8: a paged KV cache in 16 bit or int8, read by our kernels."""

BACKEND_NAME = "SUPERL8"
BACKEND_PATH = "vllm_superl8.attention.backend.Superl8AttentionBackend"


def register() -> None:
    """Make ``--attention-backend SUPERL8`` known to vLLM. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
