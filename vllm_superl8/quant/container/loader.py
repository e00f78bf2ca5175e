# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's model loader for ``.superl8`` files: BaseModelLoader's flow, fed with views of the mapped file."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.checkpoint.superl8_decode import decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import Blob, Container
from vllm_superl8.formats.layout import GGML
from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.container.engine_args import LOAD_FORMAT
from vllm_superl8.quant.stored import StoredInt4LinearMethod, StoredInt8LinearMethod, StoredInt8MoEMethod

logger = init_logger(__name__)

AS_STORED = (StoredInt8LinearMethod, StoredInt8MoEMethod, StoredInt4LinearMethod)


@register_model_loader(LOAD_FORMAT)
class Superl8ModelLoader(BaseModelLoader):
    """Hands the tensors of `model_config.model_weights` to the model under the names of its checkpoint.

    Codes go into int8 layers as they are, with their scales; what no kernel takes is dequantised a tensor at a time.
    Layers of other pipeline stages are not read.
    """

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            raise ValueError(f"load format {LOAD_FORMAT} takes no --model-loader-extra-config")

    def download_model(self, model_config: ModelConfig) -> None:
        """The file is on this machine already."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        file = Superl8File(model_config.model_weights)
        model.load_weights(weights(file, model, model_config.dtype))


def weights(file: Superl8File, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as the model's load_weights takes them, each read, and its CRC checked, when it is asked for."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    as_stored = {name for method in methods if isinstance(method, AS_STORED) for name in method.names}
    header, scales = file.header, file.header.scales
    if any(isinstance(method, BlockLinearMethod) for method in methods):
        in_blocks = {name for name, blob in header.tensors.items() if _has_kernel(blob)}
    else:
        in_blocks = set()
    names = [name for name in header.tensors if name not in scales and not is_pp_missing_parameter(name, model)]
    _log(header, names, as_stored | in_blocks, dtype)
    for name in names:
        blob = header.tensors[name]
        if name in as_stored:
            yield name, file.tensor(name)
            yield f"{name}_scale", file.scales(name)
        elif blob.scheme == "raw":
            yield name, file.tensor(name)
        elif name in in_blocks:
            yield name, StoredMatrix(file.tensor(name), GGML[blob.codebook.upper()], dtype)
        else:
            yield name, decode(file, name, dtype)


def _has_kernel(blob: Blob) -> bool:
    """Whether layers may keep the GGUF blocks; other layers decode a StoredMatrix by themselves."""
    layout = GGML.get(blob.codebook.upper()) if blob.scheme == "gguf_kquant" and not blob.rotated else None
    return layout is not None and blob.shape[1] % layout.bytes == 0


def _log(header: Container, names: list[str], kept: set[str], dtype: torch.dtype) -> None:
    counts = Counter((header.tensors[name].scheme, name in kept) for name in names)
    for (scheme, as_stored), count in counts.most_common():
        if as_stored or scheme == "raw":
            logger.info("%s: %d tensors of scheme %s taken as they are", header.path.name, count, scheme)
        else:
            logger.warning(
                "%s: %d tensors of scheme %s dequantised to %s at load: no kernel takes them as stored in their layers",
                header.path.name,
                count,
                scheme,
                str(dtype).removeprefix("torch."),
            )
