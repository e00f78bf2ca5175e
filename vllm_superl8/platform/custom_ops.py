# SPDX-License-Identifier: BSD-3-Clause
"""vLLM CustomOps whose CUDA version needs modules that vLLM's empty build does not have."""

from importlib.util import find_spec


def register() -> None:
    """Replace them through CustomOp.register_oot. Idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    name = ApplyRotaryEmb.__name__
    if not current_platform.is_cuda() or name in op_registry_oot:
        return
    if HAS_TRITON and find_spec("vllm.vllm_flash_attn.layers"):
        return

    @ApplyRotaryEmb.register_oot
    class TorchApplyRotaryEmb(ApplyRotaryEmb):
        """Rotary embedding of vision towers in plain torch, where FlashAttention's Triton kernel is missing."""

        def forward_cuda(self, x, cos, sin):
            return self.forward_native(x, cos, sin)
