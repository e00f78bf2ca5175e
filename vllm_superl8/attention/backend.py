# SPDX-License-Identifier: BSD-3-Clause
"""vLLM attention backend over a paged KV cache of any format of KV_LAYOUTS (vLLM 0.33's AttentionBackend interface)."""

from dataclasses import replace
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_superl8.attention import BACKEND_NAME, kv_cache
from vllm_superl8.attention.metadata import Superl8Metadata, Superl8MetadataBuilder
from vllm_superl8.formats.layout import KV_LAYOUTS, KVLayout
from vllm_superl8.ops.dense_attention import dense_attention
from vllm_superl8.ops.kv_write import kv_cache_write
from vllm_superl8.ops.paged_attention import paged_attention

PAGE_TOKENS = 16
"""Every page is a multiple of this many tokens."""

HEAD_DIMS = range(32, 257, 8)

ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)


class Superl8AttentionBackend(AttentionBackend):
    """Attention by our kernels: decoder and cross attention over the paged cache, encoder-only layers without one;
    window, softcap, sinks, ALiBi, any GQA ratio."""

    kv_layout: ClassVar[KVLayout | None] = None
    """Format of a quantised cache; None: floating point."""
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type["Superl8AttentionImpl"]:
        return Superl8AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Superl8MetadataBuilder]:
        return Superl8MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_TOKENS)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_DIMS

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in kv_cache.supported_names()

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A page of one KV head must be contiguous: it holds planes, not rows (see formats.layout.KVLayout)."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec):
        if cls.kv_layout is None:
            return spec
        return replace(spec, state_content_bytes=cls.kv_layout.token_bytes(spec.head_size))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


def _quantized_backends() -> dict[str, type[Superl8AttentionBackend]]:
    """The backend for each quantised format, by class name. They differ in the size of a token, for which vLLM asks the
    class, by a spec that does not name the --kv-cache-dtype; attention.backend_path says which class is whose."""
    rows = {layout.name: layout for layout in KV_LAYOUTS.values() if layout.quantized}
    return {
        (name := f"{Superl8AttentionBackend.__name__}_{layout.name}"): type(
            name, (Superl8AttentionBackend,), {"kv_layout": layout, "__module__": __name__}
        )
        for layout in rows.values()
    }


globals().update(_quantized_backends())


class Superl8AttentionImpl(AttentionImpl[Superl8Metadata]):
    """One attention layer.

    Raises ValueError for what the kernels do not do, naming it.
    """

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown,
    ) -> None:
        if unknown:
            raise ValueError(f"attention backend {BACKEND_NAME} does not know {', '.join(sorted(unknown))}")
        if attn_type not in ATTENTION_TYPES:
            raise ValueError(f"attention backend {BACKEND_NAME} serves {', '.join(ATTENTION_TYPES)}, not {attn_type}")
        if attn_type == AttentionType.ENCODER_ONLY and sinks is not None:
            raise ValueError(f"attention backend {BACKEND_NAME} has no sinks in encoder-only layers")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        layout = kv_cache.quantized_layout(kv_cache_dtype)
        self.kv_format = "auto" if layout is None else layout.name
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.float()

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write key and value (tokens, num_kv_heads, head_size) to their slots; -1 marks padding. Encoder-only layers
        have no cache."""
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        kv_cache_write(key, value, kv_cache, slot_mapping, self.kv_format)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Superl8Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query (tokens, num_heads, head_size) over the cache, in an encoder-only layer over key and value; into
        output, which is returned."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(f"attention backend {BACKEND_NAME} does not quantise its output")
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.zero_()
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            dense_attention(
                query, key, value, output, attn_metadata.query_start_loc, attn_metadata.max_query_len, self.scale,
                attn_metadata.causal, self.sliding_window, self.logits_soft_cap, self.alibi_slopes,
            )  # fmt: skip
            return output
        paged_attention(
            query,
            kv_cache,
            output,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            attn_metadata.max_query_len,
            attn_metadata.num_splits,
            self.scale,
            self.kv_format,
            causal=attn_metadata.causal,
            sliding_window=self.sliding_window,
            logit_softcap=self.logits_soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
        )
        return output
