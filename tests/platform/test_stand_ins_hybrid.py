# SPDX-License-Identifier: BSD-3-Clause
"""Operators of convolutions, Mamba 2 and gated delta networks, called as vLLM calls them, against loops in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vllm_superl8.platform import stand_ins

stand_ins.install("cpu")
from vllm import _custom_ops as ops  # noqa: E402  (the stand-ins come first)

LIMIT = 1e-5  # of the largest result; measured 2.2e-6: float32 sums over up to 150 tokens


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def close(got, want):
    assert got.shape == want.shape
    size = want.abs().max()
    assert size > 0.1, "the reference is too small to prove anything"
    return (got.double() - want).abs().max() / size < LIMIT


# ---- convolutions


def convolve(history, x, weight, bias, silu):
    """Outputs (channels, n) and the next history, one output at a time."""
    seen = torch.cat([history, x], -1).double()
    width = weight.shape[1]
    out = torch.stack([(seen[:, i : i + width] * weight.double()).sum(-1) for i in range(x.shape[1])], -1)
    out = out + bias.double().unsqueeze(-1) if bias is not None else out
    return F.silu(out) if silu else out, seen[:, -(width - 1) :]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("state_width", [3, 5])  # wider where drafting is configured
def test_convolutions_go_one_token_on(generator, activation, has_bias, state_width):
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, 4, generator=generator)
    bias = torch.randn(6, generator=generator) if has_bias else None
    states = torch.randn(9, state_width, 6, generator=generator).transpose(1, 2)  # a strided view, as vLLM's
    before, slots = states.clone(), torch.tensor([7, 0, 2, 5], dtype=torch.int32)  # slot 0 is padding
    got = ops.causal_conv1d_update_cpu_vec(x, states, weight, bias, activation, slots, None, 0)
    assert torch.equal(got[1], x[1]) and torch.equal(states[0], before[0])
    untouched = [1, 3, 4, 6, 8]
    assert torch.equal(states[untouched], before[untouched])
    for request, slot in ((0, 7), (2, 2), (3, 5)):
        want, history = convolve(before[slot, :, :3], x[request].unsqueeze(1), weight, bias, activation)
        assert close(got[request], want[:, 0])
        assert close(states[slot, :, :3], history) and torch.equal(states[slot, :, 3:], before[slot, :, 3:])


def test_convolutions_take_several_tokens_a_request(generator):
    x, weight = torch.randn(7, 6, generator=generator), torch.randn(6, 3, generator=generator)
    states = torch.randn(4, 6, 2, generator=generator)
    starts, before = torch.tensor([0, 1, 1, 7], dtype=torch.int32), states.clone()
    got = ops.causal_conv1d_update_cpu_vec(x, states, weight, None, "silu", torch.tensor([3, 1, 2]), starts, 0)
    for request, slot in ((0, 3), (2, 2)):
        rows = slice(starts[request], starts[request + 1])
        want, history = convolve(before[slot], x[rows].T, weight, None, True)
        assert close(got[rows].T, want) and close(states[slot], history)
    assert torch.equal(states[1], before[1])
    batched = ops.causal_conv1d_update_cpu_vec(x[1:].T.unsqueeze(0), before[2:3], weight, None, "silu", None, None, -1)
    assert close(batched[0].T, got[1:].double())


def test_convolutions_with_packed_weights(generator):
    """The operators of hosts with bfloat16 instructions."""
    x, weight = torch.randn(5, 6, generator=generator), torch.randn(6, 4, generator=generator)
    packed, states = ops.causal_conv1d_weight_pack(weight), torch.zeros(3, 6, 3)
    starts, slots = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    got = ops.causal_conv1d_fwd_cpu(x.T, packed, None, states, starts, slots, torch.tensor([False]), True, True)
    want, history = convolve(torch.zeros(6, 3), x.T, weight, None, True)
    assert close(got, want) and close(states[1], history)
    got = ops.causal_conv1d_update_cpu(x[:1], states, packed, None, True, slots, True)
    assert close(got[0], convolve(history, x[:1].T, weight, None, True)[0][:, 0])


def test_convolutions_verify_drafts(generator):
    """Histories start where the accepted tokens of the last step ended; all drafts are kept until they are judged."""
    x, weight = torch.randn(2, 3, 6, generator=generator), torch.randn(6, 4, generator=generator)
    states = torch.randn(3, 6, 5, generator=generator)  # width - 1 + 2 drafts
    before, accepted = states.clone(), torch.tensor([1, 3], dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    got = ops.causal_conv1d_update_cpu(x, states, weight, None, False, slots, True, accepted)
    for request, (slot, first) in enumerate(((2, 0), (0, 2))):
        history = before[slot, :, first : first + 3]
        want, _ = convolve(history, x[request].T, weight, None, False)
        assert close(got[request].T, want)
        assert torch.equal(states[slot], torch.cat([history[:, 1:], x[request].T], 1))


# ---- Mamba 2


def scan(state, x, dt, A, B, C, D, z):
    """Token by token: state (heads, D, N), x (tokens, heads, D), dt (tokens, heads), B, C (tokens, groups, N)."""
    state, outs = state.double().clone(), []
    repeat = x.shape[1] // B.shape[1]
    for t in range(x.shape[0]):
        b, c = (v[t].double().repeat_interleave(repeat, 0) for v in (B, C))
        step = dt[t].double().view(-1, 1, 1)
        state = state * torch.exp(step * A.double().view(-1, 1, 1)) + step * x[t].double().unsqueeze(-1) * b.unsqueeze(
            1
        )
        y = (state * c.unsqueeze(1)).sum(-1) + x[t].double() * D.double().view(-1, 1)
        outs.append(y * F.silu(z[t].double()) if z is not None else y)
    return torch.stack(outs), state


def mamba(tokens, generator, heads=4, groups=2, width=5, states=6):
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "x": random(tokens, heads, width),
        "dt": torch.rand(tokens, heads, generator=generator) * 0.5,
        "A": -torch.rand(heads, generator=generator) - 0.1,
        "B": random(tokens, groups, states),
        "C": random(tokens, groups, states),
        "D": random(heads),
        "z": random(tokens, heads, width),
    }


@pytest.mark.parametrize("has_z", [True, False])
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [5, 0, 150]])
def test_prompts_are_scanned(generator, lengths, has_z):
    m = mamba(sum(lengths), generator)
    z = m["z"] if has_z else None
    states = torch.randn(len(lengths), 4, 5, 6, generator=generator)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    out, before = torch.empty_like(m["x"]), states.clone()
    ops.mamba_chunk_scan_fwd_cpu(out, states, m["x"], m["dt"], m["A"], m["B"], m["C"], m["D"], z, starts)
    for request, length in enumerate(lengths):
        if not length:
            assert torch.equal(states[request], before[request])
            continue
        part = slice(int(starts[request]), int(starts[request + 1]))
        arguments = (m["x"][part], m["dt"][part], m["A"], m["B"][part], m["C"][part], m["D"])
        want, state = scan(before[request], *arguments, None if z is None else z[part])
        assert close(out[part], want) and close(states[request], state)


def decode_arguments(m, bias):
    """As MambaMixer2 expands them: A (heads, D, N), dt (tokens, heads, D), D and dt_bias (heads, D)."""
    width = m["x"].shape[-1]
    return (
        m["x"], m["dt"].unsqueeze(-1).expand(-1, -1, width), m["A"].view(-1, 1, 1).expand(-1, width, 6), m["B"], m["C"],
        m["D"].unsqueeze(-1).expand(-1, width), None, bias.unsqueeze(-1).expand(-1, width), True,
    )  # fmt: skip


def test_states_go_one_token_on(generator):
    m, bias = mamba(3, generator), torch.randn(4, generator=generator)
    state, out = torch.randn(6, 4, 5, 6, generator=generator), torch.zeros(3, 4, 5)
    before, slots = state.clone(), torch.tensor([4, 0, 2], dtype=torch.int32)  # slot 0 is padding
    ops.selective_state_update_cpu(state, *decode_arguments(m, bias), slots, None, 0, out, None, None)
    for request, slot in ((0, 4), (2, 2)):
        one = slice(request, request + 1)
        dt = F.softplus(m["dt"][one] + bias)
        want, after = scan(before[slot], m["x"][one], dt, m["A"], m["B"][one], m["C"][one], m["D"], None)
        assert close(out[request], want[0]) and close(state[slot], after)
    assert torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_states_of_drafts_go_to_slots_of_their_own(generator):
    m, bias = mamba(5, generator), torch.zeros(4)
    state, out = torch.randn(9, 4, 5, 6, generator=generator), torch.zeros(5, 4, 5)
    before = state.clone()
    slots, accepted = torch.tensor([[1, 2, 3], [6, 7, 8]]), torch.tensor([2, 1])
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    ops.selective_state_update_cpu(state, *decode_arguments(m, bias), slots, slots, 0, out, accepted, starts)
    for request, first in ((0, 2), (1, 6)):
        after = before[first]
        for step, t in enumerate(range(int(starts[request]), int(starts[request + 1]))):
            one, dt = slice(t, t + 1), F.softplus(m["dt"][t : t + 1])
            want, after = scan(after, m["x"][one], dt, m["A"], m["B"][one], m["C"][one], m["D"], None)
            assert close(out[t], want[0]) and close(state[slots[request, step]], after)


# ---- gated delta networks


def delta(state, q, k, v, a, b, A_log, dt_bias):
    """Token by token: state (heads, K, V), q, k (tokens, key heads, K), v (tokens, heads, V), a, b (tokens, heads)."""
    state, outs = state.double().clone(), []
    repeat = v.shape[1] // q.shape[1]
    for t in range(v.shape[0]):
        query, key = (F.normalize(x[t].double(), dim=-1).repeat_interleave(repeat, 0) for x in (q, k))
        decay = torch.exp(-A_log.double().exp() * F.softplus(a[t].double() + dt_bias.double()))
        state = state * decay.view(-1, 1, 1)
        error = v[t].double() - (state * key.unsqueeze(-1)).sum(1)
        state = state + key.unsqueeze(-1) * (error * b[t].double().sigmoid().unsqueeze(-1)).unsqueeze(1)
        outs.append((state * query.unsqueeze(-1)).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(outs), state


def network(tokens, generator, key_heads=2, heads=4, key_width=8, value_width=6):
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return (
        random(tokens, key_heads, key_width) * 3, random(tokens, key_heads, key_width) * 3,
        random(tokens, heads, value_width), random(tokens, heads), random(tokens, heads), random(heads), random(heads),
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [5, 150]])
def test_delta_rule_over_prompts(generator, lengths):
    q, k, v, a, b, A_log, dt_bias = network(sum(lengths), generator)
    states = torch.randn(7, 4, 8, 6, generator=generator)
    before, slots = states.clone(), torch.tensor([5, 0, 2][: len(lengths)], dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    g, beta = ops.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    whole = [x.unsqueeze(0) for x in (q, k, v)]
    out, _ = ops.chunk_gated_delta_rule_cpu(*whole, g, beta, states, True, starts, False, True, slots, 1e-12)
    for slot, (start, end) in zip(slots.tolist(), itertools.pairwise(starts.tolist()), strict=True):
        part = (x[start:end] for x in (q, k, v, a, b))
        want, after = delta(before[slot], *part, A_log, dt_bias)
        assert close(out[0, start:end], want) and close(states[slot], after)
    others = [slot for slot in range(7) if slot not in slots.tolist()]
    assert torch.equal(states[others], before[others])


def test_delta_rule_goes_one_token_on(generator):
    q, k, v, a, b, A_log, dt_bias = network(3, generator)
    states, slots = torch.randn(6, 4, 8, 6, generator=generator), torch.tensor([4, 1, 2], dtype=torch.int32)
    before, starts = states.clone(), torch.arange(4, dtype=torch.int32)
    whole = [x.unsqueeze(0) for x in (q, k, v)]
    out = ops.fused_sigmoid_gating_delta_rule_update_cpu(A_log, dt_bias, *whole, a, b, states, slots, starts, True)
    for t, slot in enumerate(slots.tolist()):
        want, after = delta(before[slot], *(x[t : t + 1] for x in (q, k, v, a, b)), A_log, dt_bias)
        assert close(out[t], want) and close(states[slot], after)


def test_delta_rule_verifies_drafts(generator):
    q, k, v, a, b, A_log, dt_bias = network(5, generator)
    states = torch.randn(9, 4, 8, 6, generator=generator)
    before, starts = states.clone(), torch.tensor([0, 3, 5], dtype=torch.int32)
    slots, accepted = torch.tensor([[1, 2, 3], [6, 7, 8]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    out = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log, dt_bias, q, k, v, a, b, states, slots, accepted, starts, True
    )
    for request, first in ((0, 2), (1, 6)):
        after = before[first]
        for step, t in enumerate(range(int(starts[request]), int(starts[request + 1]))):
            want, after = delta(after, *(x[t : t + 1] for x in (q, k, v, a, b)), A_log, dt_bias)
            assert close(out[t], want[0]) and close(states[slots[request, step]], after)
