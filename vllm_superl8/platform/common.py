# SPDX-License-Identifier: BSD-3-Clause
"""What the CPU and the Volta platform answer alike."""

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # FlashInfer has no Volta code; vLLM would probe for it and warn.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # torch's symmetric memory starts at sm_90.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # A redirect is followed without asking the list of allowed domains again.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
}
"""Defaults of vLLM's variables here; a value that the user has set wins."""


def pre_register() -> None:
    """Settings that must stand before vLLM builds its configuration."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm_superl8.quant import gguf

    gguf.register()  # again: another plugin may have patched the same method since


def import_ir_kernels() -> None:
    """vLLM's own IR implementations and ours."""
    import vllm.kernels  # noqa: F401

    from vllm_superl8.platform import ir_provider  # noqa: F401


def ir_op_priority(vllm_config: "VllmConfig"):
    """Our kernels first; plain torch first where inductor fuses it with its neighbours."""
    from vllm.config.compilation import CompilationMode
    from vllm.config.kernel import IrOpPriorityConfig

    compilation = vllm_config.compilation_config
    inductor = compilation.backend == "inductor" and compilation.mode != CompilationMode.NONE
    norms = ["native"] if inductor else ["superl8", "native"]
    return IrOpPriorityConfig.with_default(["native"], rms_norm=norms, fused_add_rms_norm=norms)


def apply_defaults(vllm_config: "VllmConfig", compile_by_default: bool) -> None:
    """Fill in compilation settings that the user left open.

    Without compilation, CUDA graphs hold whole decode steps, because vLLM's piecewise graphs need a compiled graph
    to cut.
    """
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.mode is None and not compile_by_default:
        compilation.mode = CompilationMode.NONE
    if compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def attention_backend(platform, selected_backend, config) -> str | None:
    """Class path of our backend when it is asked for or nothing is, and it can serve the layer; else None.

    Raises ValueError, with the reasons, when our backend was selected by name and cannot serve the layer.
    """
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_superl8.attention import BACKEND_NAME, backend_path
    from vllm_superl8.attention.backend import Superl8AttentionBackend

    ours = AttentionBackendEnum[BACKEND_NAME]
    if selected_backend not in (None, ours) or config.use_mla or config.use_sparse:
        return None
    capability = platform.get_device_capability() or DeviceCapability(7, 0)
    reasons = Superl8AttentionBackend.validate_configuration(device_capability=capability, **config._asdict())
    if not reasons:
        return backend_path(config.kv_cache_dtype)
    if selected_backend is ours:
        raise ValueError(f"attention backend {BACKEND_NAME} cannot serve {config}: {'; '.join(reasons)}")
    logger.warning("attention backend %s does not serve this layer (%s); asking vLLM", BACKEND_NAME, "; ".join(reasons))
    return None


@cache
def register_triton_overrides(device: str) -> None:
    """Replace the Triton kernels that vLLM launches by torch code, where there is no Triton. Once in a process."""
    from vllm.triton_utils.dispatcher import register_kernels

    from vllm_superl8.platform.triton_overrides import overrides

    register_kernels(overrides(device))


class SharedPlatform:
    """The hooks that both platforms answer alike; stands before vLLM's class in their bases."""

    device_type: str

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: the stand-ins are in place already."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        import_ir_kernels()

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        pre_register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig"):
        return ir_op_priority(vllm_config)

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "vllm_superl8.platform.fusion.PassManager"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend, attn_selector_config: "AttentionSelectorConfig", num_heads: int | None = None
    ) -> str:
        path = attention_backend(cls, selected_backend, attn_selector_config)
        return path or super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            register_triton_overrides(cls.device_type)
