# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a GGUF model under the names, and in the layout, of its Hugging Face checkpoint."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_superl8.checkpoint.gguf_config import architecture_of
from vllm_superl8.checkpoint.gguf_header import Header, Tensor
from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.checkpoint.gguf_tensors import PLAIN, check_types, read, stored_rows
from vllm_superl8.formats.layout import GGML
from vllm_superl8.quant.gguf.naming import checkpoint_shapes, naming

logger = init_logger(__name__)

IN_CONFIG = ("rope_freqs.weight",)
"""Tensors that say something about the configuration (see checkpoint.gguf_rope) and are no weights."""

ONE_ROW = ".shared_expert_gate.weight"
"""Checkpoint name of a matrix of one row, which llama.cpp stores as a vector."""


def check(header: Header, hf_config: Any) -> None:
    """Refuse a file whose tensors are not, one for one, those of the model that its configuration describes.

    Raises ValueError naming the file and the tensor.
    """
    check_types(header.tensors.values())
    names, _ = naming(header, hf_config)
    expected = checkpoint_shapes(hf_config)
    if hf_config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    for tensor in header.tensors.values():
        if tensor.name in IN_CONFIG:
            continue
        name = names.get(tensor.name)
        shape = expected.pop(name, None)
        if shape is None:
            raise ValueError(
                f"{header.path}: tensor {tensor.name} has no place in {hf_config.architectures[0]}; the file holds "
                "another model than its metadata says, or one that superl8 does not serve: take its Hugging Face "
                "checkpoint"
            )
        if tensor.shape != shape and (1, *tensor.shape) != shape:
            raise ValueError(
                f"{header.path}: tensor {tensor.name} has shape {list(tensor.shape)}, the file's metadata ask for "
                f"{list(shape)}; take another conversion of the model"
            )
    if expected:
        missing = next(iter(expected))
        stored = next((stored for stored, name in names.items() if name == missing), missing)
        raise ValueError(f"{header.path}: tensor {stored} is missing; take another conversion of the model")


def weights(
    header: Header, hf_config: Any, dtype: torch.dtype, in_blocks: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as the Hugging Face checkpoint has them, in `dtype`, each read when it is asked for.

    Matrices whose type has a kernel come as StoredMatrix. in_blocks says, for the log, whether layers keep them.
    """
    _log_types(header, dtype, in_blocks)
    names, transform = naming(header, hf_config)
    for name, value in transform(_named(header, names, hf_config, dtype)):
        yield name, value.to(dtype)


def _named(header: Header, names: dict[str, str], hf_config: Any, dtype: torch.dtype) -> Iterator:
    paired = architecture_of(header).rotary_pairs
    heads = {"attn_q": hf_config.num_attention_heads, "attn_k": hf_config.num_key_value_heads}
    for tensor in header.tensors.values():
        if tensor.name in IN_CONFIG:
            continue
        value = _value(tensor, dtype)
        kind = tensor.name.split(".")[-2]
        if paired and kind in heads:
            if isinstance(value, StoredMatrix):
                value = value.with_blocks(split_rotary_pairs(value.blocks, heads[kind]))
            else:
                value = split_rotary_pairs(value, heads[kind])
        name = names[tensor.name]
        yield name, value.unsqueeze(0) if name.endswith(ONE_ROW) else value


def _value(tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    if len(tensor.shape) == 2 and tensor.type.name in GGML:
        return StoredMatrix(stored_rows(tensor), GGML[tensor.type.name], dtype)
    # Norms stay exact until the adapter has taken 1 off them, where it does.
    return read(tensor, torch.float32 if len(tensor.shape) == 1 else dtype)


def split_rotary_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k from llama.cpp's order, the two of a rotary pair beside each other, to a checkpoint's halves.

    weight   (num_heads * head_dim, ...)
    returns  the same shape: in each head first the first rows of all pairs, then the second ones
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _log_types(header: Header, dtype: torch.dtype, in_blocks: bool) -> None:
    target = str(dtype).removeprefix("torch.")
    for kind, count in Counter(tensor.type for tensor in header.tensors.values()).most_common():
        if kind in PLAIN:
            text = f"taken in {target}" + (", matrices of linear layers as Q8_0" if in_blocks else "")
        elif in_blocks and kind.name in GGML:
            text = f"kept as they are (kernels block_gemm_{GGML[kind.name].name}), in experts decoded to {target}"
        elif in_blocks:
            text = f"decoded to {target}, by linear layers as Q8_0, since {kind.name} has no kernel of its own"
        else:
            text = f"decoded to {target}, by linear layers as int8, as option activation asks"
        logger.info("%s: %d tensors are %s", kind.name, count, text)
