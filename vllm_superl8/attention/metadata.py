# SPDX-License-Identifier: BSD-3-Clause
"""Per-batch metadata of the attention backend."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_superl8.device import multiprocessors

MAX_DECODE_QUERY_TOKENS = 16
"""Query tokens a sequence up to which one launch serves a whole decode batch (speculative verification)."""

BLOCKS_PER_MULTIPROCESSOR = 4
"""Thread blocks that a decode launch aims for on each multiprocessor, so that long contexts of few sequences are split
over the card: as many as attn_decode has resident up to head_dim 64, one and a third times as many above."""

MIN_SPLIT_TOKENS = 256
"""Context tokens a split is worth having for."""


@dataclass
class Superl8Metadata:
    """One batch, as the kernels read it. No tensor is copied to the host.

    query_start_loc  (num_seqs + 1) int32 device
    seq_lens         (num_seqs) int32 device, context lengths with the new tokens
    block_table      (num_seqs, max_pages) int32 device
    slot_mapping     (num_tokens) int64 device, -1 for padding
    max_query_len    host, longest query of the batch
    num_splits       host, parts that a decode's context is cut into; fixed for a batch size, whatever the lengths
    causal           False for bidirectional drafts
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    num_splits: int
    causal: bool


def num_decode_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, multiprocessors: int) -> int:
    """How many parts to cut a context into, from host numbers alone, so that a CUDA graph may keep it."""
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * multiprocessors // max(1, num_seqs * num_kv_heads))
    worth = -(-max_seq_len // MIN_SPLIT_TOKENS)
    return max(1, min(wanted, worth, 64))


class Superl8MetadataBuilder(AttentionMetadataBuilder[Superl8Metadata]):
    """Builds Superl8Metadata from what vLLM has on host and device, without a host sync."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Superl8Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise ValueError("attention backend SUPERL8: a batch that mixes causal and bidirectional sequences")
        return Superl8Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
            num_splits=num_decode_splits(
                common.num_reqs, self.kv_cache_spec.num_kv_heads, common.max_seq_len, multiprocessors(self.device)
            ),
            causal=common.causal,
        )

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return Superl8Metadata(**{**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping})
