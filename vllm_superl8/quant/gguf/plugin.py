# SPDX-License-Identifier: BSD-3-Clause
"""vllm-gguf-plugin's modules: names and transforms of weights, and references to files.

The package imports its Triton kernels as a whole, although none is used here. Where there is no Triton, vLLM's
placeholder stands for it during that import, and no longer, so that nothing else takes it for Triton.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType


def module(name: str) -> ModuleType:
    """vllm_gguf_plugin.<name>."""
    with _placeholder():
        return importlib.import_module(f"vllm_gguf_plugin.{name}")


@contextlib.contextmanager
def _placeholder() -> Iterator[None]:
    from vllm.triton_utils import tl, triton
    from vllm.triton_utils.importing import TritonPlaceholder

    names = {"triton": triton, "triton.language": tl}
    if importlib.util.find_spec("triton") is not None or not isinstance(triton, TritonPlaceholder):
        yield
        return
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
