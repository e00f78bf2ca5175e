# SPDX-License-Identifier: BSD-3-Clause
"""What the attention backend decides on the host."""

import pytest

from vllm_superl8.attention.metadata import num_decode_splits

V100, CMP_100_210, P40 = 80, 68, 30  # multiprocessors


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_seq_len", "multiprocessors", "splits"),
    [
        (1, 8, 32768, V100, 40),  # 320 blocks
        (1, 8, 32768, CMP_100_210, 34),
        (1, 8, 32768, P40, 15),
        (1, 8, 1024, V100, 4),  # parts of 256 tokens
        (1, 1, 131072, V100, 64),  # the most
        (8, 8, 32768, V100, 5),
        (64, 8, 32768, V100, 1),
        (0, 8, 0, V100, 1),
    ],
)
def test_contexts_are_split_to_fill_the_card(num_seqs, num_kv_heads, max_seq_len, multiprocessors, splits):
    assert num_decode_splits(num_seqs, num_kv_heads, max_seq_len, multiprocessors) == splits
