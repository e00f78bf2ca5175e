# SPDX-License-Identifier: BSD-3-Clause
"""act_and_mul and act, against their formulas written out in float64."""

import math

import pytest
import torch

from vllm_superl8.ops import activation
from vllm_superl8.ops.registry import OPS

from tolerances import arithmetic_limit, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def gelu(v):
    return v * 0.5 * (1 + math.erf(v / math.sqrt(2)))


def gelu_tanh(v):
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def clamp(v, limit):
    return max(-limit, min(limit, v))


def oai(gate, up, alpha, limit):
    gate = min(gate, limit)
    return gate * sigmoid(alpha * gate) * (clamp(up, limit) + 1)


GATED = {
    # name: (parameters, f(gate, up))
    "silu": ((), lambda g, u: g * sigmoid(g) * u),
    "gelu": ((), lambda g, u: gelu(g) * u),
    "gelu_tanh": ((), lambda g, u: gelu_tanh(g) * u),
    "mul_and_silu": ((), lambda g, u: g * u * sigmoid(u)),
    "fatrelu": ((0.4,), lambda g, u: g * u if g > 0.4 else 0.0),
    "situ": ((1.5, 2.0), lambda g, u: 1.5 * math.tanh(g / 1.5) * sigmoid(g) * 2 * math.tanh(u / 2)),
    "situ, no linear beta": ((1.5, -1.0), lambda g, u: 1.5 * math.tanh(g / 1.5) * sigmoid(g) * u),
    "silu_clamp": ((2.0, 1.3, 0.5), lambda g, u: min(g, 2) * sigmoid(1.3 * min(g, 2)) * (clamp(u, 2) + 0.5)),
    "swigluoai": ((1.702, 2.5), lambda g, u: oai(g, u, 1.702, 2.5)),
    "swiglustep": ((1.5,), lambda g, u: min(g * sigmoid(g), 1.5) * clamp(u, 1.5)),
}
PLAIN = {
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_quick": lambda v: v * sigmoid(1.702 * v),
    "relu2": lambda v: max(v, 0) ** 2,
    "silu_no_mul": lambda v: v * sigmoid(v),
}


def data(*shape, dtype, device):
    """Normal values with mean 0.5 and standard deviation 2."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2 + 0.5).to(device, dtype)


def test_every_activation_is_tested():
    assert {name.split(",")[0] for name in GATED} == set(activation.GATED)
    assert set(PLAIN) == set(activation.PLAIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("n", [24, 33])  # 16 bytes at a time, and one element at a time
def test_act_and_mul_is_the_formula(kernels, name, n, dtype):
    parameters, formula = GATED[name]
    name = name.split(",")[0]
    x = data(3, 2 * n, dtype=dtype, device=kernels.device)
    gate, up = (x[:, ::2], x[:, 1::2]) if name == "swigluoai" else x.chunk(2, -1)
    want = torch.tensor(
        [[formula(*pair) for pair in zip(*rows, strict=True)] for rows in zip(gate.tolist(), up.tolist(), strict=True)]
    )
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        out = torch.empty(3, n, dtype=dtype, device=kernels.device)
        run("act_and_mul", out, x, name, *parameters)
        assert relative_error(out, want) < arithmetic_limit("act_and_mul", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("n", [24, 33])
def test_act_is_the_formula(kernels, name, n, dtype):
    x = data(3, n, dtype=dtype, device=kernels.device)
    want = torch.tensor([[PLAIN[name](v) for v in row] for row in x.tolist()])
    for run in (kernels.run, lambda op, *args: OPS[op].reference(*args)):
        out = torch.empty_like(x)
        run("act", out, x, name)
        assert relative_error(out, want) < arithmetic_limit("act", dtype)


@pytest.mark.parametrize(("rows", "n"), [(0, 8), (1, 1), (2, 7), (1, 2048), (2, 2056)])  # 2048: one block of threads
def test_act_and_mul_takes_any_size(kernels, rows, n):
    x = data(rows, 2 * n, dtype=torch.float32, device=kernels.device)
    got, want = torch.empty(rows, n, device=kernels.device), torch.empty(rows, n, device=kernels.device)
    kernels.run("act_and_mul", got, x, "silu")
    OPS["act_and_mul"].reference(want, x, "silu")
    assert relative_error(got, want) < arithmetic_limit("act_and_mul", torch.float32)


@pytest.mark.parametrize("offset", [8, 3])  # rows that start on 16 bytes, and that do not
def test_act_and_mul_takes_strided_rows_and_more_dimensions(kernels, offset):
    x = data(2, 3, 80, dtype=torch.float16, device=kernels.device)[..., offset : offset + 64]
    got, want = (torch.empty(2, 3, 32, dtype=d, device=kernels.device) for d in (torch.float16, torch.float32))
    kernels.run("act_and_mul", got, x, "gelu")
    OPS["act_and_mul"].reference(want, x.float(), "gelu")
    assert relative_error(got, want) < arithmetic_limit("act_and_mul", torch.float16)


@pytest.mark.parametrize("name", [*activation.GATED])
def test_act_and_mul_keeps_nan(kernels, name):
    x = torch.ones(1, 16, device=kernels.device)
    x[0, 3] = float("nan")
    out = torch.empty(1, 8, device=kernels.device)
    kernels.run("act_and_mul", out, x, name, 2.0, 2.0)
    assert out.isnan().sum() == 1


def test_activations_refuse_what_does_not_fit(kernels):
    x = torch.zeros(2, 8, device=kernels.device)
    with pytest.raises(ValueError, match=r"there is none called 'sillu'; known are silu, gelu"):
        kernels.run("act_and_mul", x[:, :4].contiguous(), x, "sillu")
    with pytest.raises(ValueError, match=r"silu: out is \(2, 8\)"):
        kernels.run("act_and_mul", torch.zeros_like(x), x, "silu")
