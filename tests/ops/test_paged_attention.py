# SPDX-License-Identifier: BSD-3-Clause
"""paged_attention as an op: its reference, what it refuses, tracing. Its kernels have tests of their own."""

from types import SimpleNamespace

import pytest
import torch
from pages import EXACT, FEATURES, STORED, Batch

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
    "feature", ["plain", "window_16", "window_20", "alibi", "bidirectional", "bidirectional_window"]
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
