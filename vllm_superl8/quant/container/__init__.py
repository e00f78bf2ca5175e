# SPDX-License-Identifier: BSD-3-Clause
"""``.superl8`` files, served alone: configuration, tokenizer and quantised weights from the one file."""


def register() -> None:
    """Make ``.superl8`` files known to vLLM: our loader, and what turns a name into arguments. Idempotent."""
    from vllm_superl8.patches import create_model_config
    from vllm_superl8.quant.container import loader  # noqa: F401  (registers itself on import)
    from vllm_superl8.quant.container.engine_args import prepare

    create_model_config.install(prepare)
