# SPDX-License-Identifier: BSD-3-Clause
"""quantize_int8: kernel and reference agree bit for bit. tests/formats/test_int8.py tests the reference itself."""

import pytest
import torch

from vllm_superl8.ops import quantize  # noqa: F401  registers the op
from vllm_superl8.ops.registry import OPS

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# around the 8 elements of a thread and the 2048 of a block
ROW_LENGTHS = [1, 7, 8, 9, 255, 2040, 2048, 2056, 4103]
GROUPS = [(32, 32), (96, 32), (64, 64), (192, 64), (128, 128), (384, 128)]


def data(*shape, dtype, device):
    """Normal values with mean 0.3, every 64th column fifty times as large, and a row of zeros (the second)."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.3
    x[..., ::64] *= 50
    x.view(-1, shape[-1])[1:2] = 0
    return x.to(device, dtype)


def assert_same(kernels, x, group_size):
    codes, scales = kernels.run("quantize_int8", x, group_size)
    want_codes, want_scales = OPS["quantize_int8"].reference(x.cpu(), group_size)
    assert codes.is_contiguous() and scales.is_contiguous()
    assert torch.equal(codes.cpu(), want_codes)
    assert torch.equal(scales.cpu().nan_to_num(-1), want_scales.nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", ROW_LENGTHS)
def test_quantize_int8_matches_reference_by_row(kernels, k, dtype):
    assert_same(kernels, data(3, k, dtype=dtype, device=kernels.device), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "group_size"), GROUPS)
def test_quantize_int8_matches_reference_by_group(kernels, k, group_size, dtype):
    assert_same(kernels, data(7, k, dtype=dtype, device=kernels.device), group_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("offset", [8, 3])  # keeps rows on 16 bytes, or not
def test_quantize_int8_takes_strided_rows_and_more_dimensions(kernels, offset, group_size, dtype):
    x = data(2, 3, 136, dtype=dtype, device=kernels.device)[..., offset : offset + 96]
    assert not x.is_contiguous()
    assert_same(kernels, x, group_size)
    assert_same(kernels, x.transpose(0, 1), group_size)
    assert_same(kernels, x.transpose(-1, -2)[..., :1].transpose(-1, -2), group_size)


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_quantize_int8_shows_what_is_not_finite(kernels, bad, group_size):
    x = data(3, 96, dtype=torch.float32, device=kernels.device)
    x[2, 40] = bad
    x[2, 41] = float("inf")  # NaN wins over it
    assert_same(kernels, x, group_size)
    _, scales = kernels.run("quantize_int8", x, group_size)
    assert torch.isfinite(scales[:2]).all()
    assert (torch.isnan if bad != bad else torch.isinf)(scales[2]).any()


@pytest.mark.parametrize("group_size", [-1, 64])
def test_quantize_int8_takes_the_smallest_and_largest_numbers(kernels, group_size):
    x = torch.tensor([1e-45, 1e-38, 3e38, 6e-5]).repeat_interleave(64).view(4, 64) * torch.linspace(-1, 1, 64)
    assert_same(kernels, x.to(kernels.device), group_size)
    assert_same(kernels, torch.full((2, 64), 65504.0, dtype=torch.float16, device=kernels.device), group_size)


def test_quantize_int8_rounds_half_to_even(kernels):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]], device=kernels.device)
    codes, scales = kernels.run("quantize_int8", x)
    assert scales.item() == 1
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


@pytest.mark.parametrize("group_size", [-1, 32])
def test_quantize_int8_takes_no_rows(kernels, group_size):
    codes, scales = kernels.run("quantize_int8", torch.empty(0, 64, device=kernels.device), group_size)
    assert codes.shape == (0, 64) and scales.shape == (0, 64 // (64 if group_size == -1 else 32))


def test_quantize_int8_refuses_bad_arguments(kernels):
    with pytest.raises(
        ValueError, match=r"group_size is 32 for rows of 48, wanted -1 \(the row\) or one of 32, 64, 128"
    ):
        kernels.run("quantize_int8", torch.ones(1, 48, device=kernels.device), 32)
    with pytest.raises(ValueError, match="group_size is 16 for rows of 48"):
        kernels.run("quantize_int8", torch.ones(1, 48, device=kernels.device), 16)
    with pytest.raises(ValueError, match="rows of no elements"):
        kernels.run("quantize_int8", torch.ones(3, 0, device=kernels.device))
    with pytest.raises(TypeError, match=r"quantize_int8: got torch\.int32"):
        kernels.run("quantize_int8", torch.ones(1, 32, dtype=torch.int32, device=kernels.device))


@pytest.mark.parametrize("group_size", [-1, 128])
def test_quantize_int8_fake_has_the_shapes_of_the_result(group_size):
    x = torch.ones(2, 3, 256)
    real, fake = OPS["quantize_int8"].reference(x, group_size), OPS["quantize_int8"].fake(x, group_size)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
