# SPDX-License-Identifier: BSD-3-Clause
"""The platform on a machine with no GPU: vLLM's CPU platform, served by the torch references."""

from typing import TYPE_CHECKING

from vllm_superl8.platform import common, stand_ins

stand_ins.install("cpu")

from vllm.platforms.cpu import CpuPlatform  # noqa: E402  (the stand-ins come first)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Superl8CpuPlatform(common.SharedPlatform, CpuPlatform):
    """vLLM's CPU platform without vLLM's compiled extensions."""

    simple_compile_backend = "eager"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        common.apply_defaults(vllm_config, compile_by_default=False)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        if vllm_config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            vllm_config.parallel_config.worker_cls = "vllm_superl8.platform.cpu_worker.Superl8CpuWorker"
