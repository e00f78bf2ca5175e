# SPDX-License-Identifier: BSD-3-Clause
"""``DefaultModelLoader.get_all_weights``: convert the tensors of a quantised checkpoint between file and model.

Why: vLLM gives a quantisation method the stored tensors layer by layer, in the layout of their file, so that every
scheme needs its own parameters, tensor-parallel slicing and expert loading. Converted in the stream, every scheme
arrives as the same int8 codes and scales, and one linear and one expert method serve all. A load format of our own
would do the same, but only where the user or a platform of ours sets it.
Written for vLLM 0.33; goes when vLLM lets a quantisation method transform the weight stream.
"""

from collections.abc import Callable, Iterator
from functools import wraps

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

Weights = Iterator[tuple[str, Tensor]]


def install(transform: Callable[[ModelConfig, nn.Module, Weights], Weights | None]) -> None:
    """Hand the model what ``transform(model_config, model, weights)`` makes of the weights; None leaves them alone.

    Where they are transformed, vLLM checks that every parameter was loaded, which it otherwise does for 16-bit
    checkpoints only. Idempotent.
    """
    original = DefaultModelLoader.get_all_weights
    if getattr(original, "superl8_transform", False):
        return

    @wraps(original)
    def get_all_weights(self, model_config, model):
        weights = original(self, model_config, model)
        transformed = transform(model_config, model, weights)
        if transformed is None:
            return weights
        if self.enable_weights_track is None:
            self.enable_weights_track = True
        return transformed

    get_all_weights.superl8_transform = True
    DefaultModelLoader.get_all_weights = get_all_weights
