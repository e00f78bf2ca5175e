# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 experts whose codes come from a quantised checkpoint (converted by stream.py)."""

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.quant.checkpoint.linear import checked
from vllm_superl8.quant.checkpoint.targets import Target, int8_group_size
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import Options


class CheckpointMoEMethod(Int8MoEMethod):
    """W8A8 experts from stored matrices.

    parts  the checkpoint's matrices of these experts

    Raises ValueError for experts with biases.
    """

    uses_meta_device = False

    def __init__(self, moe, parts: list[Matrix], options: Options, prefix: str):
        super().__init__(moe, -1, prefix)
        self.parts, self.options = parts, options
        self.targets: dict[str, Target] = {}

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        self._refuse_biases()
        shards = 2 if self.moe.is_act_and_mul else 1
        shapes = {
            "w13": (num_experts, shards * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        # A stored matrix does not say which of the two it is, so both get the groups that both can have.
        size = min(
            int8_group_size(self.parts, shape[-1], self.options, f"{self.prefix}.{name}")
            for name, shape in shapes.items()
        )
        self.targets = {part.name: Target("int8", size) for part in self.parts}
        scheme = FusedMoeWeightScaleSupported.CHANNEL if size == -1 else FusedMoeWeightScaleSupported.GROUP
        attrs = {**extra_weight_attrs, "weight_loader": checked(extra_weight_attrs["weight_loader"])}
        for name, shape in shapes.items():
            groups = 1 if size == -1 else shape[-1] // size
            weight = Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
            scales = Parameter(torch.empty(*shape[:2], groups, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(weight, attrs)
            set_weight_attrs(scales, {**attrs, "quant_method": scheme.value})
            layer.register_parameter(f"{name}_weight", weight)
            layer.register_parameter(f"{name}_weight_scale", scales)
