# SPDX-License-Identifier: BSD-3-Clause
"""Published quantised checkpoints: their tensors become our formats on the way from file to model."""


def register() -> None:
    """Let the tensors of quantised checkpoints pass through stream.transform. Idempotent."""
    from vllm_superl8.patches import get_all_weights
    from vllm_superl8.quant.checkpoint.stream import transform

    get_all_weights.install(transform)
