# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's model loader for GGUF files: BaseModelLoader's flow, fed from the file."""

from pathlib import Path

from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_superl8.checkpoint.gguf_header import read_model
from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.gguf.engine_args import LOAD_FORMAT
from vllm_superl8.quant.gguf.weights import weights


@register_model_loader(LOAD_FORMAT)
class GgufModelLoader(BaseModelLoader):
    """Hands the tensors of `model_config.model_weights` to the model as a Hugging Face checkpoint would.

    Linear layers keep the blocks of matrices (quant.blocks). Layers that quantise online (quant.linear) take tensors
    one at a time, so that no more than a layer is held in 16 bit.
    """

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            raise ValueError(f"load format {LOAD_FORMAT} takes no --model-loader-extra-config")

    def download_model(self, model_config: ModelConfig) -> None:
        """The file is on this machine already: engine_args brought it before the configuration was made."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        header = read_model(Path(model_config.model_weights))
        in_blocks = any(isinstance(getattr(m, "quant_method", None), BlockLinearMethod) for m in model.modules())
        model.load_weights(weights(header, model_config.hf_config, model_config.dtype, in_blocks))
