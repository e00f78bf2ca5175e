# SPDX-License-Identifier: BSD-3-Clause
"""``EngineArgs.create_model_config``: rewrite the arguments first, so that --model may be a GGUF or .superl8 file.

Why: vLLM 0.33 has no hook between parsing its arguments and reading the model's config.json; a config parser
(``register_config_parser``) could supply the configuration, but not the tokenizer, the loader or the served name.
vllm-gguf-plugin patches the same method; ours must run first, or it would see that plugin's choices as the user's.
Written for vLLM 0.33; goes when vLLM lets a plugin resolve --model.
"""

from collections.abc import Callable
from functools import wraps

from vllm.engine.arg_utils import EngineArgs

_installed: Callable | None = None
_prepares: list[Callable[[EngineArgs], None]] = []


def install(prepare: Callable[[EngineArgs], None]) -> None:
    """Call ``prepare(engine_args)`` before vLLM, and any other patch so far, makes its ModelConfig.

    Several callers are served in the order of their first calls. Idempotent, and to be called again when another
    package may have patched the method meanwhile: a second layer is put on top then, and `prepare` must do nothing
    when it runs again.
    """
    global _installed
    if prepare not in _prepares:
        _prepares.append(prepare)
    patched = EngineArgs.create_model_config
    if patched is _installed:
        return

    @wraps(patched)
    def create_model_config(self, *args, **kwargs):
        for prepare in _prepares:
            prepare(self)
        return patched(self, *args, **kwargs)

    EngineArgs.create_model_config = _installed = create_model_config
