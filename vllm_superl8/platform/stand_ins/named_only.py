# SPDX-License-Identifier: BSD-3-Clause
"""Operators of _C that vLLM's compilation passes name when they are imported, and that Volta never runs.

vLLM 0.33 reads them as attributes at import of its fusion passes on CUDA; the fusions themselves need FP8 hardware or
are off. A call says what it is and fails.
"""

from vllm_superl8.platform.stand_ins import library

_SCHEMAS = (
    "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor? scale_ub=None) "
    "-> ()",
    "rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) residual, Tensor weight, Tensor "
    "scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, "
    "Tensor? scale_ub=None, Tensor(c!)? residual=None) -> ()",
    "silu_and_mul_quant(Tensor(a!) result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor(a!) out, Tensor input, Tensor(b!) scales, int group_size, Tensor? "
    "scale_ub=None, bool is_scale_transposed=False) -> ()",
    "fused_qk_norm_rope(Tensor(a!) qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids) -> ()",
)


def define(device: str) -> None:
    """Define them on "cuda"; the passes are not imported on "cpu"."""
    if device != "cuda":
        return
    for schema in _SCHEMAS:
        library.define("_C", schema, _refuse(schema.split("(")[0]))


def _refuse(name):
    def refuse(*_, **__):
        raise RuntimeError(f"_C::{name} is an operator of vLLM's own extension and has no Volta kernel")

    return refuse
