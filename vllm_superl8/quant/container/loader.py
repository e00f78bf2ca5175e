# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's model loader for ``.superl8`` files: BaseModelLoader's flow, fed with views of the mapped file."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from vllm_superl8.checkpoint.superl8_decode import decode
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.quant.container.engine_args import LOAD_FORMAT
from vllm_superl8.quant.stored import StoredInt8LinearMethod, StoredInt8MoEMethod

logger = init_logger(__name__)


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
    as_stored = {
        name
        for method in methods
        if isinstance(method, StoredInt8LinearMethod | StoredInt8MoEMethod)
        for name in method.names
    }
    header, scales = file.header, file.header.scales
    _log_schemes(header.path, Counter((blob.scheme, name in as_stored) for name, blob in header.tensors.items()
                                      if name not in scales), dtype)  # fmt: skip
    for name, blob in header.tensors.items():
        if name in scales or is_pp_missing_parameter(name, model):
            continue
        if name in as_stored:
            yield name, file.tensor(name)
            yield f"{name}_scale", file.scales(name)
        elif blob.scheme == "raw":
            yield name, file.tensor(name)
        else:
            yield name, decode(file, name, dtype)


def _log_schemes(path: Path, counts: Counter, dtype: torch.dtype) -> None:
    for (scheme, stored), count in counts.most_common():
        if stored or scheme == "raw":
            logger.info("%s: %d tensors of scheme %s taken as they are", path.name, count, scheme)
        else:
            logger.warning(
                "%s: %d tensors of scheme %s dequantised to %s at load: no kernel takes them as stored in their layers",
                path.name,
                count,
                scheme,
                str(dtype).removeprefix("torch."),
            )
