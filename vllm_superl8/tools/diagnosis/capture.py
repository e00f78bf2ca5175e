# SPDX-License-Identifier: BSD-3-Clause
"""What goes on inside a model of vLLM's during one forward pass, taken by hooks on its modules."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

LAYER = re.compile(r"(^|\.)layers\.\d+$")


@dataclass
class Capture:
    """Of one pass over the text; only the tokens at `positions` where not said otherwise.

    hidden       last hidden states of all tokens (tokens, hidden)
    gemm_in      linear layer to its input
    gemm_out     linear layer to its output
    attention    attention layer to its output
    kv           attention layer to its K and V inputs (positions, num_kv_heads * head_dim)
    layer_in     decoder layer to its floating-point arguments, all tokens: the hidden states and, where there are two,
                 the residual
    layer_sum    decoder layer to its output, the sum of hidden states and residual
    layer_step   decoder layer to what it adds to its input
    """

    hidden: torch.Tensor | None = None
    gemm_in: dict[str, torch.Tensor] = field(default_factory=dict)
    gemm_out: dict[str, torch.Tensor] = field(default_factory=dict)
    attention: dict[str, torch.Tensor] = field(default_factory=dict)
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    layer_in: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    layer_sum: dict[str, torch.Tensor] = field(default_factory=dict)
    layer_step: dict[str, torch.Tensor] = field(default_factory=dict)


def modules(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, nn.Module]]:
    """(linear layers, attention layers, decoder layers) by name."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase

    named = dict(model.named_modules())
    linear = {name: module for name, module in named.items() if isinstance(module, LinearBase)}
    attention = {name: module for name, module in named.items() if isinstance(module, Attention)}
    layers = {
        name: module for name, module in named.items() if LAYER.search(name) and any(True for _ in module.children())
    }
    return linear, attention, layers


@contextmanager
def capturing(
    model: nn.Module,
    tokens: int,
    positions: torch.Tensor,
    inside: bool,
    replace: dict[str, list[torch.Tensor]] | None = None,
) -> Iterator[Capture]:
    """Capture the next forward pass over `tokens` tokens; passes over another number of tokens are left alone.

    inside   whether more than the last hidden states is wanted
    replace  layer_in of another capture: each decoder layer gets these arguments in place of its own, so that what
             earlier layers did wrong does not reach it
    """
    capture, handles = Capture(), []

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value.detach()[:tokens][positions.to(value.device)].float().cpu()

    def last(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and len(hidden) >= tokens:
            capture.hidden = hidden.detach()[:tokens].clone()

    def linear(name):
        def hook(module, args, output):
            out = output[0] if isinstance(output, tuple) else output
            if args and len(args[0]) >= tokens:
                capture.gemm_in[name], capture.gemm_out[name] = rows(args[0]), rows(out)

        return hook

    def attention(name):
        def hook(module, args, output):
            if len(output) >= tokens:
                capture.attention[name] = rows(output.flatten(1))
                if len(args) >= 3 and args[1] is not None:
                    capture.kv[name] = rows(args[1].flatten(1)), rows(args[2].flatten(1))

        return hook

    def before_layer(name):
        def hook(module, args, kwargs):
            slots = _slots(args, kwargs, tokens)
            if not slots:
                return None
            given = [_get(args, kwargs, slot) for slot in slots]
            if replace is not None and name in replace:
                for value, other in zip(given, replace[name], strict=True):
                    value[:tokens].copy_(other)
            capture.layer_in[name] = [value.detach()[:tokens].clone() for value in given]
            return None

        return hook

    def after_layer(name):
        def hook(module, args, kwargs, output):
            if name in capture.layer_in:
                parts = [part for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
                total = sum(rows(part) for part in parts[:2])
                capture.layer_sum[name] = total
                capture.layer_step[name] = total - sum(rows(part) for part in capture.layer_in[name])

        return hook

    handles.append(model.register_forward_hook(last))
    if inside:
        linears, attentions, layers = modules(model)
        handles += [module.register_forward_hook(linear(name)) for name, module in linears.items()]
        handles += [module.register_forward_hook(attention(name)) for name, module in attentions.items()]
        for name, module in layers.items():
            handles.append(module.register_forward_pre_hook(before_layer(name), with_kwargs=True))
            handles.append(module.register_forward_hook(after_layer(name), with_kwargs=True))
    try:
        yield capture
    finally:
        for handle in handles:
            handle.remove()


def _slots(args: tuple, kwargs: dict, tokens: int) -> list[int | str]:
    """Where a decoder layer's arguments have hidden states: matrices of floating point with a row a token."""
    named = [*enumerate(args), *kwargs.items()]
    return [
        slot
        for slot, value in named
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 2 and len(value) >= tokens
    ][:2]


def _get(args: tuple, kwargs: dict, slot: int | str) -> torch.Tensor:
    return args[slot] if isinstance(slot, int) else kwargs[slot]
