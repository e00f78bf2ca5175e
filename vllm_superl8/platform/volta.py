# SPDX-License-Identifier: BSD-3-Clause
"""The platform on sm_70 and sm_61 cards: vLLM's CUDA platform without vLLM's compiled extensions.

On a newer card under SUPERL8_FORCE_VOLTA=1 it reports (7, 0), so that what runs there is what runs on Volta.
"""

from functools import cache
from typing import TYPE_CHECKING

from vllm_superl8 import envs
from vllm_superl8.platform import common, stand_ins

stand_ins.install("cuda")

import torch  # noqa: E402
from vllm.platforms.cuda import CudaPlatform  # noqa: E402  (the stand-ins come first)
from vllm.platforms.interface import DeviceCapability  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class VoltaPlatform(common.SharedPlatform, CudaPlatform):
    """vLLM's CUDA platform as far as it goes on Volta, our kernels where it does not."""

    @classmethod
    @cache
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        if envs.force_volta():
            return DeviceCapability(7, 0)
        return super().get_device_capability(device_id)

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """bfloat16 too: our kernels store it and compute in float32 or integers."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Every dtype of supported_dtypes is served on every capability, so there is nothing to refuse."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.triton_utils import HAS_TRITON

        common.apply_defaults(vllm_config, compile_by_default=HAS_TRITON)

    @classmethod
    def get_supported_vit_attn_backends(cls):
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        backends = [AttentionBackendEnum.TORCH_SDPA]
        return [*backends, AttentionBackendEnum.TRITON_ATTN] if HAS_TRITON else backends

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config):
        """Plain torch attention: FlashAttention, the stock choice below sm_100, has no Volta code."""
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

        return MLAPrefillBackendEnum.CPU.get_class()

    @classmethod
    def get_punica_wrapper(cls) -> str:
        from vllm.triton_utils import HAS_TRITON

        if HAS_TRITON:
            return super().get_punica_wrapper()
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """Needs vLLM's extension and peer access, which PCIe x1 cards lack."""
        return False

    @classmethod
    def support_deep_gemm(cls) -> bool:
        return False
