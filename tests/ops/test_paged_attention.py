# SPDX-License-Identifier: BSD-3-Clause
"""paged_attention as an op: its reference, what it refuses, tracing. Its kernels have tests of their own."""

from types import SimpleNamespace

import pytest
import torch
from pages import EXACT, FEATURES, STORED, Batch, check

from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.registry import OPS

from faults import FAULTS
from tolerances import QUALITY, Quality, arithmetic_limit, relative_error

REFERENCE = SimpleNamespace(
    device=torch.device("cpu"), run=lambda op, *args, **kwargs: OPS[op].reference(*args, **kwargs)
)


REFERENCE_CASES = [(*stored, "plain") for stored in STORED] + [(*EXACT[0], feature) for feature in FEATURES]


@pytest.mark.parametrize(("kv_format", "dtype", "feature"), REFERENCE_CASES)
def test_paged_attention_reference_is_attention_over_the_decoded_cache(kv_format, dtype, feature):
    lens, seqs = (1, 5, 0, 20, 1), (33, 40, 0, 20, 1)
    batch = Batch(lens, seqs, kv_format, dtype, page_size=32, padding=2, options=FEATURES.get(feature, {}))
    got = batch.call(REFERENCE)
    assert torch.isnan(got[-2:]).all()
    assert relative_error(got[:-2], batch.want()) < arithmetic_limit("paged_attention", dtype)


@pytest.mark.parametrize(
    "feature",
    ["plain", "window_16", "window_20", "alibi", "bidirectional", "bidirectional_window", "symmetric_window"],
)
@pytest.mark.parametrize("query_len", [1, 7, 40])
@pytest.mark.parametrize("group", [1, 2])
def test_the_short_way_of_the_reference_equals_the_definition(group, query_len, feature):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, query_len, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 4 // group, 40, 16, generator=generator, dtype=torch.float64)
    options = {"causal": True, **FEATURES.get(feature, {})}
    first = 40 - query_len
    short = attend(query, k, v, first, 0.3, **options)
    # A sink that weighs nothing keeps attend from calling torch's attention.
    long = attend(query, k, v, first, 0.3, **options, sinks=torch.full((4,), -torch.inf))
    assert relative_error(short, long) < 1e-12


def test_the_definition_is_softmax_attention():
    generator = torch.Generator().manual_seed(0)
    query, k, v = torch.randn(3, 1, 4, 8, generator=generator, dtype=torch.float64)
    got = attend(query, k, v, 0, 0.5, causal=True, sinks=torch.tensor([0.7]))
    for t in range(4):
        weights = (query[0, t] @ k[0, : t + 1].T * 0.5).exp()
        want = weights @ v[0, : t + 1] / (weights.sum() + torch.tensor(0.7, dtype=torch.float64).exp())
        assert relative_error(got[0, t], want) < 1e-6  # the sink is float32


@pytest.mark.parametrize("feature", ["plain", "softcap"])
def test_a_token_that_sees_no_key_gives_zeros(feature):
    batch = Batch((4,), (2,), options=FEATURES.get(feature, {}))
    got = batch.call(REFERENCE)
    assert not got[:2].any() and got[2:].all(-1).any()


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
def test_paged_attention_crosses_to_fewer_keys_than_query_tokens(kernels, kv_format, dtype):
    # Cross attention: a prompt and a few decoded tokens over what an encoder left.
    check(kernels, Batch((40, 3, 1), (20, 1, 17), kv_format, dtype, 4, 4, options={"causal": False}), 2)


def tree(*parents):
    """Ancestor masks of a tree of drafts, from the parent of each token (-1: none)."""
    masks = []
    for token, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << token)
    return torch.tensor(masks, dtype=torch.int64).to(torch.int32)  # the last of 32 bits is the sign


def test_a_tree_without_branches_is_causal_and_a_leaf_sees_its_path_only():
    chain = tree(*range(-1, 4))
    assert chain.tolist() == [1, 3, 7, 15, 31]
    plain, as_tree = Batch((5,), (40,)), Batch((5,), (40,), options={"ancestors": chain})
    assert torch.equal(plain.want(), as_tree.want())
    # The second child of the root, asked alone, stands right behind the root.
    generator = torch.Generator().manual_seed(0)
    query, k, v = torch.randn(3, 1, 3, 8, generator=generator, dtype=torch.float64)
    branches = attend(query, k, v, 0, 0.5, True, ancestors=tree(-1, 0, 0))
    alone = attend(query[:, 2:], k[:, [0, 2]], v[:, [0, 2]], 1, 0.5, True)
    assert relative_error(branches[:, 2:], alone) < 1e-12


TREES = {
    "one": (tree(-1),),
    "binary": (tree(-1, 0, 0, 1, 1, 2, 2), tree(-1, 0)),
    "wide": (tree(-1, *[0] * 15), tree(-1, 0, 1, 0)),
    "two_roots": (tree(-1, -1, 0, 1),),
    "all_bits": (tree(-1, *range(15), *[3] * 16),),
}


@pytest.mark.parametrize(("kv_format", "dtype"), EXACT)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("shape", TREES)
def test_paged_attention_verifies_trees(kernels, shape, num_heads, num_kv_heads, num_splits, kv_format, dtype):
    # From one row to 128: attn_decode's and attn_prefill's.
    masks = TREES[shape]
    lens = tuple(len(mask) for mask in masks)
    options = {"ancestors": torch.cat(masks), "logit_softcap": 5.0}
    contexts = (70, 4)[: len(lens)]
    batch = Batch(lens, contexts, kv_format, dtype, num_heads, num_kv_heads, options=options)
    check(kernels, batch, num_splits)


def test_paged_attention_refuses_trees_that_it_cannot_tell(kernels):
    options = {"ancestors": torch.full((33,), -1, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"up to 32 query tokens a sequence.*got 33 tokens, a window of 0"):
        Batch((33,), (40,), options=options).call(kernels)
    options = {"ancestors": tree(-1, 0), "sliding_window": 4}
    with pytest.raises(ValueError, match="without sliding_window and alibi_slopes; got 2 tokens, a window of 4"):
        Batch((2,), (40,), options=options).call(kernels)
    with pytest.raises(ValueError, match=r"ancestors are \(3,\), query \(2, 4, 64\)"):
        Batch((2,), (40,), options={"ancestors": tree(-1, 0, 1)}).call(kernels)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_quality_bar_rejects_faults(fault):
    want = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert Quality.of(want + 1e-3 * want.roll(1), want).meets(QUALITY["paged_attention"])
    assert not Quality.of(FAULTS[fault](want), want).meets(QUALITY["paged_attention"])


def call(batch, run, **changes):
    arguments = {
        "query": batch.query,
        "kv_cache": batch.cache,
        "out": torch.empty_like(batch.query),
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens_tensor,
        "query_start_loc": batch.query_start_loc,
        "max_query_len": 1,
        "num_splits": 1,
        "softmax_scale": 0.1,
        "kv_format": "int8",
        **changes,
    }
    run(*arguments.values())


def test_paged_attention_refuses_what_does_not_fit(kernels):
    batch = Batch((1,), (20,))

    def run(*arguments):
        kernels.run("paged_attention", *(a.to(kernels.device) if isinstance(a, torch.Tensor) else a for a in arguments))

    with pytest.raises(ValueError, match=r"format 'bf16' is torch\.int8, wanted torch\.bfloat16"):
        call(batch, run, kv_format="bf16")
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        call(batch, run, query=batch.query[:, :3], out=torch.empty_like(batch.query)[:, :3])
    with pytest.raises(ValueError, match=r"query is \(1, 4, 64\) torch.float16, out \(1, 4, 64\) torch.float32"):
        call(batch, run, out=batch.query.float())
    with pytest.raises(ValueError, match=r"seq_lens must be contiguous torch\.int32, got torch\.int64"):
        call(batch, run, seq_lens=batch.seq_lens_tensor.long())
    with pytest.raises(ValueError, match="last dimension of query and out must be contiguous"):
        call(batch, run, out=batch.query.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="head_dim is 12, wanted a multiple of 8 up to 256"):
        odd = torch.ones(1, 2, 12)
        call(batch, run, query=odd, out=torch.empty_like(odd), kv_cache=torch.zeros(1, 2, 16, 24), kv_format="auto")
    with pytest.raises(ValueError, match="a page has 8 tokens, wanted a multiple of 16"):
        call(batch, run, kv_cache=batch.cache.contiguous().view(-1, 2, 8, 136))


def test_paged_attention_rounds_the_query_to_the_type_of_a_floating_point_cache(kernels):
    batch = Batch((1, 1), (20, 40), "fp16", torch.float32)
    exact = Batch((1, 1), (20, 40), "fp16", torch.float32)
    exact.query = batch.query.half().float()
    assert relative_error(batch.call(kernels), exact.want()) < arithmetic_limit("paged_attention", torch.float32)


def test_paged_attention_takes_an_empty_batch(kernels):
    batch = Batch((), ())
    batch.block_table, batch.seq_lens_tensor = batch.block_table[:0], batch.seq_lens_tensor[:0]
    batch.query_start_loc = batch.query_start_loc[:1]
    assert batch.call(kernels, 2).shape == (0, 4, 64)


def test_paged_attention_can_be_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = Batch((1,), (20,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = torch.empty(1, 4, 64, dtype=torch.float16)
        call(batch, torch.ops.superl8.paged_attention, out=out)
    assert out.shape == (1, 4, 64)


def test_paged_attention_runs_as_a_torch_op():
    batch = Batch((1, 3), (20, 30))
    out = torch.empty_like(batch.query)
    call(batch, torch.ops.superl8.paged_attention, out=out, max_query_len=3, softmax_scale=batch.softmax_scale)
    assert relative_error(out, batch.want()) < arithmetic_limit("paged_attention", torch.float16)
