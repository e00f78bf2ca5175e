# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 experts whose codes come from a quantised checkpoint (converted by stream.py)."""

import torch

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.quant.checkpoint.linear import checked
from vllm_superl8.quant.checkpoint.targets import Target, int8_group_size
from vllm_superl8.quant.moe import Int8MoEMethod, register_stored
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

    def create_parameters(self, layer: torch.nn.Module, shapes: dict[str, tuple[int, ...]], attrs: dict) -> None:
        # A stored matrix does not say which of the two it is, so both get the groups that both can have.
        size = min(
            int8_group_size(self.parts, shape[-1], self.options, f"{self.prefix}.{name}")
            for name, shape in shapes.items()
        )
        self.targets = {part.name: Target("int8", size) for part in self.parts}
        attrs = {**attrs, "weight_loader": checked(attrs["weight_loader"], self.parts)}
        for name, shape in shapes.items():
            register_stored(layer, name, shape, size, attrs)
