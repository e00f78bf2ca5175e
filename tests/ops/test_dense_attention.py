# SPDX-License-Identifier: BSD-3-Clause
"""dense_attention: attention within the sequences of a batch, without a cache."""

import pytest
import torch

from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.dense_attention import dense_attention

from tolerances import arithmetic_limit, relative_error


def batch(dtype, lengths, device, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths) + 2, 4, head_dim, generator=generator)
    k, v = torch.randn(2, sum(lengths) + 2, 2, head_dim, generator=generator) + 0.5
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return *(x.to(device, dtype) for x in (q, k, v)), starts


OPTIONS = [
    {}, {"causal": True}, {"sliding_window": 5}, {"causal": True, "sliding_window": 5}, {"logit_softcap": 2.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01])},
]  # fmt: skip


def check(run, dtype, lengths, device, options, head_dim=16):
    q, k, v, starts = batch(dtype, lengths, device, head_dim)
    out = torch.full_like(q, float("nan"))
    run(
        q, k, v, out, starts, max(lengths), 0.25,
        **{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()},
    )  # fmt: skip
    want = []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        heads = [x[start : start + length].double().transpose(0, 1).cpu() for x in (q, k, v)]
        if length:
            seen = attend(*heads, 0, 0.25, **{"causal": False, "symmetric_window": True, **options})
            want.append(seen.transpose(0, 1))
    assert torch.isnan(out[-2:]).all()  # beyond the last sequence
    assert relative_error(out[:-2], torch.cat(want)) < arithmetic_limit("paged_attention", dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "_".join(options) or "plain")
def test_dense_attention_attends_within_each_sequence(dtype, options):
    check(dense_attention, dtype, (7, 0, 1, 20), torch.device("cpu"), options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "_".join(options) or "plain")
def test_dense_attention_kernels_match_the_definition(kernels, dtype, options):
    # Lengths on both sides of a page, and with four rows a token on both sides of attn_decode and attn_prefill.
    def run(*args, **kwargs):
        kernels.run("dense_attention", *args, **kwargs)

    check(run, dtype, (7, 0, 16, 17, 1, 40), kernels.device, options)
    check(run, dtype, (33,), kernels.device, options, head_dim=72)


def test_dense_attention_refuses_shapes_that_do_not_fit():
    q, k, v, starts = batch(torch.float32, (3,), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"q is \(5, 3, 16\), k \(5, 2, 16\)"):
        dense_attention(q[:, :3], k, v, torch.empty_like(q[:, :3]), starts, 3, 0.25)
