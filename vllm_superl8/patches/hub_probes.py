# SPDX-License-Identifier: BSD-3-Clause
"""``maybe_override_with_speculators`` and ``get_model_path`` of vllm.engine.arg_utils: leave GGUF references alone.

Why: both take --model for a repository or folder before ``create_model_config`` runs, and fail on folder:QUANT and
repository:QUANT: the first asks for a config.json, the second, with HF_HUB_OFFLINE=1, for a snapshot.
Written for vLLM 0.33, where a single local file passes both unharmed; goes together with create_model_config.
"""

from collections.abc import Callable
from functools import wraps

from vllm.engine import arg_utils


def install(is_reference: Callable[[str], bool]) -> None:
    """Return --model unchanged from both where ``is_reference(model)``. Idempotent."""
    _patch("maybe_override_with_speculators", is_reference, _speculators)
    _patch("get_model_path", is_reference, lambda model, *_, **__: model)


def _speculators(model, tokenizer, *_, vllm_speculative_config=None, **__):
    return model, tokenizer, vllm_speculative_config


def _patch(name: str, is_reference: Callable[[str], bool], unchanged: Callable) -> None:
    original = getattr(arg_utils, name)
    if getattr(original, "superl8_probe", False):
        return

    @wraps(original)
    def probe(model, *args, **kwargs):
        return (unchanged if is_reference(model) else original)(model, *args, **kwargs)

    probe.superl8_probe = True
    setattr(arg_utils, name, probe)
