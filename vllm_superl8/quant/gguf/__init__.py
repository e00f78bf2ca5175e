# SPDX-License-Identifier: BSD-3-Clause
"""GGUF files, served alone: configuration, tokenizer and weights from the one file."""


def register() -> None:
    """Make GGUF files known to vLLM: our loader, and what turns a file's name into its arguments. Idempotent."""
    from vllm_superl8.patches import create_model_config, hub_probes
    from vllm_superl8.quant.gguf import loader  # noqa: F401  (registers itself on import)
    from vllm_superl8.quant.gguf.engine_args import is_reference, prepare

    create_model_config.install(prepare)
    hub_probes.install(is_reference)
