# SPDX-License-Identifier: BSD-3-Clause
"""dense_attention: attention within the sequences of a batch, without a cache."""

import pytest
import torch

from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.dense_attention import dense_attention

from tolerances import arithmetic_limit, relative_error


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device(request.param)


def batch(dtype, lengths, device):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths) + 2, 4, 16, generator=generator)
    k, v = torch.randn(2, sum(lengths) + 2, 2, 16, generator=generator) + 0.5
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return *(x.to(device, dtype) for x in (q, k, v)), starts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"sliding_window": 5}, {"causal": True, "sliding_window": 5}, {"logit_softcap": 2.0}],
    ids=lambda options: "_".join(options) or "plain",
)
def test_dense_attention_attends_within_each_sequence(device, dtype, options):
    lengths = (7, 0, 1, 20)
    q, k, v, starts = batch(dtype, lengths, device)
    out = torch.full_like(q, float("nan"))
    dense_attention(q, k, v, out, starts, max(lengths), 0.25, **options)
    want = []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        heads = [x[start : start + length].double().transpose(0, 1) for x in (q, k, v)]
        if length:
            want.append(attend(*heads, 0, 0.25, **{"causal": False, **options}).transpose(0, 1))
    assert torch.isnan(out[-2:]).all()  # beyond the last sequence
    limit = arithmetic_limit("paged_attention", dtype) * (4 if device.type == "cuda" else 1)  # torch in 16 bit
    assert relative_error(out[:-2], torch.cat(want)) < limit


def test_dense_attention_refuses_shapes_that_do_not_fit(device):
    q, k, v, starts = batch(torch.float32, (3,), device)
    with pytest.raises(ValueError, match=r"q is \(5, 3, 16\), k \(5, 2, 16\)"):
        dense_attention(q[:, :3], k, v, torch.empty_like(q[:, :3]), starts, 3, 0.25)
