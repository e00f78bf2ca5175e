# SPDX-License-Identifier: BSD-3-Clause
"""The quantisation method ``superl8``: 16-bit checkpoints become W8A8 while they load."""


def register() -> None:
    """Make ``--quantization superl8``, our experts and the loaders of single files known to vLLM. Idempotent."""
    from vllm_superl8.quant import config, container, gguf, moe  # noqa: F401  (config registers itself on import)

    moe.register()
    gguf.register()
    container.register()
