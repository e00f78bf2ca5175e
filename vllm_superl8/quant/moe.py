# SPDX-License-Identifier: BSD-3-Clause
"""Routed experts: W8A8 with our grouped GEMM, and a 16-bit method for where vLLM's own need its extensions."""

import torch
from torch.nn import Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from vllm_superl8.ops.act_quantize import act_and_mul_quantize
from vllm_superl8.ops.moe_gemm import moe_sum, w8a8_moe_gemm
from vllm_superl8.ops.quantize import quantize_int8

logger = init_logger(__name__)

FUSED_ACTIVATIONS = {MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu", MoEActivation.GELU_TANH: "gelu_tanh"}
"""Activations, where nothing clamps them, that are quantised as they are computed; others in two steps."""


def group_size_for(k: int, group_size: int, name: str) -> int:
    """The group size that experts with this K can have: the wanted one, else -1 (one scale a row), which is logged."""
    if group_size == -1 or k % group_size == 0:
        return group_size
    logger.warning("superl8: %s has one scale a row, its K of %d is not a multiple of %d", name, k, group_size)
    return -1


def group_size_of(layer: torch.nn.Module, name: str) -> int:
    """Columns that share a scale in experts' weights `name` (w13, w2); -1 for the whole row."""
    groups = getattr(layer, f"{name}_weight_scale").shape[-1]
    return -1 if groups == 1 else getattr(layer, f"{name}_weight").shape[-1] // groups


def local_ids(layer: torch.nn.Module, topk_ids: torch.Tensor) -> torch.Tensor:
    """Flat int32 numbers of this rank's experts for topk_ids (tokens, topk); -1 for experts of other ranks."""
    ids = topk_ids.flatten()
    if layer.expert_map is not None:
        ids = layer.expert_map[ids.long()]
    return ids.int()


def activation_config(method: FusedMoEMethodBase, layer: torch.nn.Module) -> ApplyMoEActivationConfig:
    """The numbers of the layer's activation."""
    return ApplyMoEActivationConfig.from_configs(method.moe, method.get_fused_moe_quant_config(layer))


def activate(method: FusedMoEMethodBase, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer's activation of x (rows, w13 outputs): (rows, w2 inputs)."""
    out = torch.empty(x.shape[0], layer.w2_weight.shape[2], dtype=x.dtype, device=x.device)
    return apply_moe_activation(layer.activation, out, x, activation_config=activation_config(method, layer))


def register_stored(layer: torch.nn.Module, name: str, shape: tuple[int, ...], group_size: int, attrs: dict) -> None:
    """Parameters <name>_weight int8 (experts, n, k) and <name>_weight_scale float32 (experts, n, groups) to be loaded.

    group_size  columns that share a scale; -1: the row
    attrs       what vLLM's loaders read on them
    """
    groups = 1 if group_size == -1 else shape[-1] // group_size
    scheme = FusedMoeWeightScaleSupported.CHANNEL if group_size == -1 else FusedMoeWeightScaleSupported.GROUP
    weight = Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
    scales = Parameter(torch.empty(*shape[:2], groups, dtype=torch.float32), requires_grad=False)
    set_weight_attrs(weight, attrs)
    set_weight_attrs(scales, {**attrs, "quant_method": scheme.value})
    layer.register_parameter(f"{name}_weight", weight)
    layer.register_parameter(f"{name}_weight_scale", scales)


class Int8MoEMethod(FusedMoEMethodBase):
    """W8A8 experts, quantised as they stream in; group_size as in quant.options.

    Raises ValueError for experts with biases.
    """

    uses_meta_device = True

    def __init__(self, moe, group_size: int, prefix: str):
        super().__init__(moe)
        self.group_size = group_size
        self.prefix = prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        if self.moe.has_bias:
            raise ValueError(
                f"superl8: {self.prefix} has experts with biases, which int8 does not serve; name it in option ignore"
            )
        shards = 2 if self.moe.is_act_and_mul else 1
        shapes = {
            "w13": (num_experts, shards * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        layer.orig_dtype = params_dtype
        self.create_parameters(layer, shapes, extra_weight_attrs)

    def create_parameters(self, layer: torch.nn.Module, shapes: dict[str, tuple[int, ...]], attrs: dict) -> None:
        """Register the weights w13 and w2 of these shapes (experts, n, k); attrs: what vLLM's loaders read on them."""
        for name, shape in shapes.items():
            weight = Parameter(torch.empty(shape, dtype=layer.orig_dtype, device="meta"), requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
            set_weight_attrs(weight, attrs)
        initialize_online_processing(layer)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make(
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.w13_weight.dtype == torch.int8:
            return  # quantised while loading; vLLM calls this again for the whole model
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight").data
            group_size = group_size_for(weight.shape[-1], self.group_size, f"{self.prefix}.{name}")
            codes, scales = quantize_int8(weight, group_size)
            replace_parameter(layer, f"{name}_weight", codes)
            layer.register_parameter(f"{name}_weight_scale", Parameter(scales, requires_grad=False))

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        """Routed output (tokens, hidden) of x (tokens, hidden); experts of other ranks contribute zeros."""
        tokens, topk = topk_ids.shape
        ids = local_ids(layer, topk_ids)
        if layer.apply_router_weight_on_input:
            if topk != 1:
                raise ValueError(f"superl8: router weights on the input need top-1 routing, got top-{topk}")
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        codes, scales = quantize_int8(x, group_size_of(layer, "w13"))
        hidden = w8a8_moe_gemm(codes, scales, layer.w13_weight, layer.w13_weight_scale, ids, topk, x.dtype)
        codes, scales = self._activate_and_quantize(layer, hidden)
        out = w8a8_moe_gemm(codes, scales, layer.w2_weight, layer.w2_weight_scale, ids, 1, x.dtype)
        # The router's weights belong here: this reads the experts' outputs anyway, and they are not rounded once more.
        return moe_sum(out.view(tokens, topk, out.shape[-1]), topk_weights.float())

    def _activate_and_quantize(self, layer, hidden):
        group_size = group_size_of(layer, "w2")
        name = FUSED_ACTIVATIONS.get(layer.activation)
        if name is None or activation_config(self, layer).clamp_limit is not None:
            return quantize_int8(activate(self, layer, hidden), group_size)
        return act_and_mul_quantize(hidden, name, group_size=group_size)


class TorchMoEMethod(UnquantizedFusedMoEMethod):
    """16-bit experts in plain torch, one expert after the other: where vLLM's own need its extensions or Triton.

    On CUDA it multiplies every token by every expert, so that a CUDA graph can hold it; on a CPU only the routed ones.
    """

    def __init__(self, moe):
        FusedMoEMethodBase.__init__(self, moe)  # vLLM's own would choose among kernels that are not there

    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        logger.warning_once("superl8: 16-bit experts run one after the other in plain torch, which is slow")

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        ids = local_ids(layer, topk_ids).view(topk_ids.shape)
        weights = topk_weights.float()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(layer.w13_weight.shape[0]):
            chosen = ids == expert
            share = (weights * chosen).sum(-1, keepdim=True)  # (tokens, 1)
            if x.is_cuda:
                out += self._expert(layer, expert, x, share)
            elif (rows := chosen.any(-1).nonzero().flatten()).numel():
                out[rows] += self._expert(layer, expert, x[rows], share[rows])
        return out.to(x.dtype)

    def _expert(self, layer, expert, x, share):
        on_input = layer.apply_router_weight_on_input
        hidden = x * share.to(x.dtype) if on_input else x
        hidden = self._linear(layer, "w13", expert, hidden)
        out = self._linear(layer, "w2", expert, activate(self, layer, hidden)).float()
        return out * (share != 0) if on_input else out * share

    def _linear(self, layer, name, expert, x):
        bias = getattr(layer, f"{name}_bias")[expert] if self.moe.has_bias else None
        return torch.nn.functional.linear(x, getattr(layer, f"{name}_weight")[expert], bias)


def register() -> None:
    """Put TorchMoEMethod in the place of vLLM's 16-bit experts where those cannot run. Idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    name = UnquantizedFusedMoEMethod.__name__
    if name not in op_registry_oot and not (current_platform.is_cuda() and HAS_TRITON):
        UnquantizedFusedMoEMethod.register_oot(TorchMoEMethod)
