# SPDX-License-Identifier: BSD-3-Clause
"""Which checkpoint name a stored tensor has, and what is left to do to it, by vllm-gguf-plugin's weights adapters.

Only the adapters' name maps and transforms are used: their loading parses the header with GGUFReader several times.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import gguf
import torch

from vllm_superl8.checkpoint.gguf_header import Header
from vllm_superl8.quant.gguf import plugin

Weights = Iterable[tuple[str, torch.Tensor]]

FIRST_EXPERT = ".mlp.experts.0."
"""In the adapters' name of a tensor that holds all experts of a layer."""


def naming(header: Header, hf_config: Any) -> tuple[dict[str, str], Callable[[Weights], Weights]]:
    """(names, transform): stored name to checkpoint name, and what the adapter does to named weights.

    Raises ValueError naming the file when the adapter does not know the model.
    """
    adapters = plugin.module("weights_adapter")
    adapter = adapters.get_weights_adapter(hf_config)
    if isinstance(adapter, adapters.Gemma3GGUFAdapter):
        mapper = plugin.module("weights_adapter.gemma3").build_gemma3_mapper(is_multimodal=False)
        stored = list(header.tensors)
        return dict(zip(stored, mapper.apply_list(stored), strict=True)), adapter.transform_weight
    if getattr(hf_config, "num_experts", 0):
        return _mixture_names(header, hf_config), adapter.map_weights
    try:
        names = adapter.build_name_map(SimpleNamespace(hf_config=hf_config, trust_remote_code=False))
    except RuntimeError as error:
        raise ValueError(f"{header.path}: vllm-gguf-plugin cannot name its tensors: {error}") from error
    return names, adapter.map_weights


def _mixture_names(header: Header, hf_config: Any) -> dict[str, str]:
    """Names of a Mixture-of-Experts model, under which the adapter cuts experts apart.

    Version 0.0.5 of the plugin does not know that transformers 5 keeps the experts of a layer in one parameter.
    """
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.metadata["general.architecture"])
    table = gguf.get_tensor_name_map(kind, hf_config.num_hidden_layers)
    names = {}
    for name in checkpoint_shapes(hf_config):
        layer, experts, projection = name.partition(FIRST_EXPERT)
        base, _, suffix = name.rpartition(".")
        if experts:
            stored = f"blk.{layer.rpartition('.')[2]}.ffn_{projection.partition('_')[0]}_exps"
        else:
            stored = table.get_name(base)
        if stored is None:
            raise ValueError(f"{header.path}: gguf has no name for {name}; take the Hugging Face checkpoint")
        names[f"{stored}.{suffix}"] = name
    return names


def checkpoint_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape of every parameter; all experts of a layer together, under the adapters' names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    shapes = {}
    for name, value in state.items():
        shape = tuple(value.shape)
        layer, experts, projection = name.partition(".mlp.experts.")
        if not experts:
            shapes[name] = shape
        elif projection == "gate_up_proj":
            count, rows, columns = shape
            shapes[f"{layer}{FIRST_EXPERT}gate_proj.weight"] = (count, rows // 2, columns)
            shapes[f"{layer}{FIRST_EXPERT}up_proj.weight"] = (count, rows // 2, columns)
        else:
            shapes[f"{layer}{FIRST_EXPERT}{projection}.weight"] = shape
    return shapes
