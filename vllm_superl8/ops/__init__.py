# SPDX-License-Identifier: BSD-3-Clause
"""The ops of this package as ``torch.ops.superl8.*``; importing it registers all of them."""

from vllm_superl8.ops.act_quantize import act_and_mul_quantize
from vllm_superl8.ops.activation import act, act_and_mul
from vllm_superl8.ops.align import moe_align
from vllm_superl8.ops.block_embedding import block_embedding
from vllm_superl8.ops.block_gemm import block_gemm
from vllm_superl8.ops.dense_attention import dense_attention
from vllm_superl8.ops.gather import embedding, embedding_int8, vocab_parallel_embedding
from vllm_superl8.ops.gemm import w8a8_gemm
from vllm_superl8.ops.kv_write import kv_cache_write
from vllm_superl8.ops.merge import merge_attn_states
from vllm_superl8.ops.moe_gemm import moe_sum, w8a8_moe_gemm
from vllm_superl8.ops.norm import fused_add_rms_norm, rms_norm
from vllm_superl8.ops.norm_quantize import add_rms_norm_quantize, rms_norm_quantize
from vllm_superl8.ops.paged_attention import paged_attention
from vllm_superl8.ops.quantize import quantize_int8
from vllm_superl8.ops.rotary import rotary_embedding
from vllm_superl8.ops.routing import topk_routing
from vllm_superl8.ops.sampling import apply_repetition_penalties, greedy_argmax, gumbel_argmax

__all__ = [
    "act",
    "act_and_mul",
    "act_and_mul_quantize",
    "add_rms_norm_quantize",
    "apply_repetition_penalties",
    "block_embedding",
    "block_gemm",
    "dense_attention",
    "embedding",
    "embedding_int8",
    "fused_add_rms_norm",
    "greedy_argmax",
    "gumbel_argmax",
    "kv_cache_write",
    "merge_attn_states",
    "moe_align",
    "moe_sum",
    "paged_attention",
    "quantize_int8",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "topk_routing",
    "vocab_parallel_embedding",
    "w8a8_gemm",
    "w8a8_moe_gemm",
]
