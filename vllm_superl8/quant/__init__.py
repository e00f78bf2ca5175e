# SPDX-License-Identifier: BSD-3-Clause
"""The quantisation method ``superl8``: checkpoints become W8A8 while they load."""


def register() -> None:
    """Make ``--quantization superl8``, our experts and what reads checkpoints known to vLLM. Idempotent."""
    from vllm_superl8.quant import checkpoint, config, container, gguf, moe  # noqa: F401  (config registers itself)

    moe.register()
    checkpoint.register()
    gguf.register()
    container.register()
