# SPDX-License-Identifier: BSD-3-Clause
"""Fusion under torch.compile: a norm or gated activation that is only quantised becomes one op.

    rms_norm(x) -> quantize_int8            becomes  rms_norm_quantize(x)
    fused_add_rms_norm(x, residual) -> ...  becomes  add_rms_norm_quantize(x, residual)
    silu(gate) * up -> ...                  becomes  act_and_mul_quantize(x)

vLLM runs these passes on the graph after autograd's part, before its own IR ops are lowered. A value that something
else reads as well (a router beside experts, an unquantised layer) keeps its norm. Without compilation the layers call
the separate ops: a norm does not know there who reads its result.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import fx
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import (
    VllmFusionPatternMatcherPass,
    VllmInductorPass,
    VllmPatternMatcherPass,
    VllmPatternReplacement,
)
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_superl8.ops.act_quantize import act_and_mul_quantize
from vllm_superl8.ops.norm_quantize import add_rms_norm_quantize, rms_norm_quantize
from vllm_superl8.ops.quantize import quantize_int8

NORM = torch.ops.vllm_ir.rms_norm.default
ADD_NORM = torch.ops.vllm_ir.fused_add_rms_norm.default

GATED = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""Gated activations of vLLM's layers, as their forward_native writes them: f(gate) * up."""

GROUP_SIZES = (-1, 32, 128)
"""What layers quantise their inputs by: the row, units of weights in blocks or 4 bits, "group128"."""

SOURCE = Path(__file__).read_text()
"""Part of the key of compiled graphs: they are made anew when a pass changes."""


class NormQuantFusionPass(VllmInductorPass):
    """Norms whose result is only quantised, all times with the same group size."""

    def __init__(self, config: VllmConfig):
        super().__init__(config)
        self.pass_name = "superl8_norm_quant_fusion"

    def uuid(self) -> str:
        return self.hash_source(SOURCE)

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in (NORM, ADD_NORM) and fuse_norm(graph, node):
                VllmPatternMatcherPass.match_table[self.pass_name] += 1


def fuse_norm(graph: fx.Graph, norm: fx.Node) -> bool:
    """Put the fused op in the place of a norm and its quantisations; False if something else reads the norm."""
    adds = norm.target is ADD_NORM
    names = ("x", *(("x_residual",) if adds else ()), "weight", "epsilon", "variance_size")
    arguments = dict(zip(names, norm.args, strict=False)) | norm.kwargs
    normalised = [user for user in norm.users if user.args[1] == 0] if adds else [norm]
    readers = [reader for value in normalised for reader in value.users]
    sizes = {_group_size(reader) for reader in readers}
    weight, offset = _stored_weight(arguments["weight"])
    if len(sizes) != 1 or None in sizes or arguments.get("variance_size") is not None:
        return False
    if weight is not None and _dtype(weight) not in (_dtype(arguments["x"]), torch.float32):
        return False
    inputs = (arguments["x"], arguments["x_residual"]) if adds else (arguments["x"],)
    op = add_rms_norm_quantize if adds else rms_norm_quantize
    with graph.inserting_before(norm):
        fused = graph.call_function(op, (*inputs, weight, arguments["epsilon"], offset, sizes.pop()))
    fused.meta["val"] = op(*fx.map_arg(fused.args, lambda node: node.meta["val"]))
    for reader in readers:
        reader.replace_all_uses_with(fused)
        graph.erase_node(reader)
    for value in normalised if adds else ():
        graph.erase_node(value)
    for user in list(norm.users):  # getitem 1, the sum
        user.args = (fused, 2)
    graph.erase_node(norm)
    return True


def _group_size(reader: fx.Node) -> int | None:
    """Group size of a quantisation, None for any other reader."""
    if reader.op != "call_function" or reader.target is not quantize_int8:
        return None
    return reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("group_size", -1)


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _stored_weight(weight: fx.Node | None) -> tuple[fx.Node | None, float]:
    """(weight, 0.0), or (w, 1.0) for Gemma's weight, which is computed as w.float() + 1."""
    if weight is None or weight.target is not torch.ops.aten.add.Tensor or weight.args[1] != 1.0:
        return weight, 0.0
    stored = weight.args[0]
    if stored.target is torch.ops.prims.convert_element_type.default:
        stored = stored.args[0]
    return stored, 1.0


class ActQuantPattern(VllmPatternReplacement):
    """activation(gate) * up, quantised, in plain torch or by vLLM's operator."""

    def __init__(self, activation: str, group_size: int, dtype: torch.dtype):
        self.activation, self.group_size, self.dtype = activation, group_size, dtype

    @property
    def pattern(self):
        def _pattern(x):
            n = x.shape[-1] // 2
            return quantize_int8(GATED[self.activation](x[..., :n]) * x[..., n:], self.group_size)

        return _pattern

    @property
    def replacement(self):
        def _replacement(x):
            return act_and_mul_quantize(x, self.activation, 0.0, 0.0, 0.0, self.group_size)

        return _replacement

    def get_inputs(self):
        return [self.empty(5, 256, dtype=self.dtype)]


class ActQuantFusionPass(VllmFusionPatternMatcherPass):
    """Gated activations whose result is only quantised."""

    def uuid(self) -> str:
        return self.hash_source(SOURCE)

    def __init__(self, config: VllmConfig):
        super().__init__(config, "superl8_act_quant_fusion")
        for activation in GATED:
            for group_size in GROUP_SIZES:
                self.register(ActQuantPattern(activation, group_size, self.model_dtype))


class PassManager(PostGradPassManager):
    """vLLM's passes and ours."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        with set_current_vllm_config(config, check_compile=False):
            self.passes += [NormQuantFusionPass(config), ActQuantFusionPass(config)]
