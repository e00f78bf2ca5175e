# SPDX-License-Identifier: BSD-3-Clause
"""Layers in blocks: mixed types, shares of a tensor-parallel rank, floats, vocabularies, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from blocks import stored
from vllm.model_executor import parameter

from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.formats.layout import LAYOUTS
from vllm_superl8.quant.blocks import BlockEmbeddingMethod, BlockLinearMethod

from tolerances import Quality

K = 512


@pytest.fixture
def rank(monkeypatch):
    """Sets the tensor-parallel rank and size that parameters see; 0 of 1 to begin with."""

    def set_rank(rank, size):
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: size)

    set_rank(0, 1)
    return set_rank


def matrix(format, n, k=K, seed=0):
    return StoredMatrix(torch.from_numpy(stored(format, n, k, seed)), LAYOUTS[format], torch.float32)


def created(sizes, k=K):
    layer, method = torch.nn.Module(), BlockLinearMethod("model.layers.0.mlp")
    method.create_weights(layer, k, sizes, k, sum(sizes), torch.float32, weight_loader=None)
    return layer, method


def loaded(layer, method):
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM calls it twice
    return method


def activations(k=K):
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(0)) + 0.3
    x[..., ::64] *= 10
    return x


def close(layer, method, weight, bias=None):
    x = activations(weight.shape[1])
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = method.apply(layer, x, bias)
    return got.shape == want.shape and Quality.of(got, want).sqnr_db > 30


def test_a_fused_layer_takes_each_shard_in_its_own_type(rank):
    layer, method = created([32, 16, 16])
    q, k, v = matrix("q4_k", 32), matrix("q4_k", 16, seed=1), matrix("q6_k", 16, seed=2)
    for loaded_weight, offset, name in ((v, 48, "v"), (q, 0, "q"), (k, 32, "k")):  # in any order
        layer.weight.load_qkv_weight(
            loaded_weight, shard_offset=offset, shard_size=loaded_weight.shape[0], shard_id=name, num_heads=1
        )
    loaded(layer, method)
    assert [(part.layout.name, part.rows) for part in layer.parts] == [("q4_k", (0, 48)), ("q6_k", (48, 64))]
    whole = torch.cat([m.values() for m in (q, k, v)])
    assert torch.equal(method.dequantize_weight(layer), whole)
    assert close(layer, method, whole)
    assert close(layer, method, whole, torch.linspace(-50, 50, 64))
    held = sum(parameter.numel() for parameter in layer.parameters())
    assert held == sum(m.blocks.numel() for m in (q, k, v))  # not a byte more than in the file


def test_floats_become_q8_0_and_are_padded_to_whole_groups(rank):
    layer, method = created([24], k=100)
    weight = torch.randn(24, 100, generator=torch.Generator().manual_seed(1)) + 0.3
    layer.weight.load_column_parallel_weight(weight)
    loaded(layer, method)
    assert [part.layout.name for part in layer.parts] == ["q8_0"]
    assert Quality.of(method.dequantize_weight(layer), weight).sqnr_db > 40
    assert close(layer, method, weight)


def test_ranks_hold_their_rows_and_columns(rank):
    whole = matrix("q5_0", 32)
    for number in range(2):
        rank(number, 2)
        layer, method = created([16])
        layer.weight.load_column_parallel_weight(whole)
        assert torch.equal(loaded(layer, method).dequantize_weight(layer), whole.values()[16 * number :][:16])
        layer, method = created([32], k=K // 2)
        layer.weight.load_row_parallel_weight(whole)
        assert torch.equal(
            loaded(layer, method).dequantize_weight(layer), whole.values()[:, K // 2 * number :][:, : K // 2]
        )
        layer, method = created([16, 16])
        layer.weight.load_merged_column_weight(whole, shard_id=0, shard_offset=0, shard_size=16)
        layer.weight.load_merged_column_weight(whole, shard_id=1, shard_offset=16, shard_size=16)
        assert torch.equal(
            loaded(layer, method).dequantize_weight(layer), whole.values()[16 * number :][:16].repeat(2, 1)
        )


def test_key_heads_that_are_fewer_than_ranks_are_shared(rank):
    whole = matrix("q8_0", 8)
    rank(3, 4)
    layer, _ = created([4])
    layer.weight.load_qkv_weight(whole, shard_offset=0, shard_size=4, shard_id="k", num_heads=2)
    assert torch.equal(layer.weight.parts[0].values(), whole.values()[4:])


def test_a_rank_that_would_cut_a_block_is_refused(rank):
    rank(1, 4)
    layer, _ = created([8], k=K // 4)
    with pytest.raises(ValueError, match="128 of 512 columns from 128 on: Q4_K has blocks of 256 columns"):
        layer.weight.load_row_parallel_weight(matrix("q4_k", 8))


def test_a_layer_that_got_less_than_its_rows_is_refused(rank):
    layer, method = created([16, 16])
    layer.weight.load_merged_column_weight(matrix("q4_0", 16), shard_id=1, shard_offset=16, shard_size=16)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp has 32 rows, of which the file gave 0"):
        method.process_weights_after_loading(layer)


def vocabulary(first=0, last=40, padded=64):
    """An embedding or LM head of tokens [first, last) of a padded vocabulary, and its method."""
    layer, method = torch.nn.Module(), BlockEmbeddingMethod()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
    layer.num_embeddings_per_partition, layer.embedding_dim = padded, K
    method.create_weights(layer, K, [padded], K, padded, torch.float32, weight_loader=None)
    return layer, method


@pytest.mark.parametrize("kind", ["q6_k", "float"])
def test_a_vocabulary_is_gathered_and_multiplied_as_it_is_stored(rank, kind):
    layer, method = vocabulary()
    stored_rows = matrix("q6_k", 40)
    values = stored_rows.values()
    layer.weight.weight_loader(layer.weight, values if kind == "float" else stored_rows)
    head, _ = vocabulary()
    method.tie_weights(head, layer)
    for which in (head, layer, head):  # in any order, and twice
        method.process_weights_after_loading(which)
    ids = torch.tensor([[0, 39], [7, 7]])
    assert torch.equal(method.embedding(layer, ids), values[ids])
    x = activations()
    logits = method.apply(head, x)
    assert logits.shape == (2, 3, 64) and not logits[..., 40:].any()
    assert Quality.of(logits[..., :40], x.double() @ values.double().T).sqnr_db > 30
    held = {parameter.data_ptr(): parameter for which in (layer, head) for parameter in which.parameters()}
    assert sum(parameter.numel() for parameter in held.values()) == (K if kind == "float" else K // 256 * 210) * 64


def test_a_rank_holds_its_share_of_a_vocabulary(rank):
    layer, method = vocabulary(first=20, last=40, padded=32)
    whole = matrix("q8_0", 40)
    layer.weight.weight_loader(layer.weight, whole)
    method.process_weights_after_loading(layer)
    ids = torch.arange(20)
    assert torch.equal(method.embedding(layer, ids), whole.values()[20:])
    assert not method.embedding(layer, ids + 20).any()


def test_a_vocabulary_without_rows_is_refused(rank):
    layer, method = vocabulary()
    with pytest.raises(ValueError, match="gave no rows of a vocabulary"):
        method.process_weights_after_loading(layer)
