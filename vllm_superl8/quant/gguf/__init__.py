# SPDX-License-Identifier: BSD-3-Clause
"""GGUF files, served alone: configuration, tokenizer and weights from the one file."""


def register() -> None:
    """Make GGUF files known to vLLM. Idempotent."""
