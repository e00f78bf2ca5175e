# SPDX-License-Identifier: BSD-3-Clause
"""The platform on a machine with no GPU: vLLM's CPU platform, served by the torch references."""

from typing import TYPE_CHECKING

from vllm_superl8.platform import common, stand_ins

stand_ins.install("cpu")

from vllm.platforms.cpu import CpuPlatform  # noqa: E402  (the stand-ins come first)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


class Superl8CpuPlatform(CpuPlatform):
    """vLLM's CPU platform without vLLM's compiled extensions."""

    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: the stand-ins are in place already."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        common.import_ir_kernels()

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        common.pre_register()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        common.apply_defaults(vllm_config, compile_by_default=False)

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig"):
        return common.ir_op_priority(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend, attn_selector_config: "AttentionSelectorConfig", num_heads: int | None = None
    ) -> str:
        path = common.attention_backend(cls, selected_backend, attn_selector_config)
        return path or super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        if vllm_config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            vllm_config.parallel_config.worker_cls = "vllm_superl8.platform.cpu_worker.Superl8CpuWorker"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            common.register_triton_overrides("cpu")
