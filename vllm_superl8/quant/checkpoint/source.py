# SPDX-License-Identifier: BSD-3-Clause
"""The quantised matrices of a published checkpoint, found by the names that vLLM's layers have."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.checkpoint.safetensors_header import Stored, read_folder
from vllm_superl8.checkpoint.schemes import reader


def read(model: str, revision: str | None, config: dict[str, Any]) -> dict[str, Matrix]:
    """Quantised matrices, by module path, of a folder or repository with this quantisation config.

    Raises ValueError, naming tensor or key, for what is missing, cut short, contradicts itself or is of another scheme.
    """
    return _read(model, revision, json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=4)
def _read(model: str, revision: str | None, config: str) -> dict[str, Matrix]:
    try:
        settings = json.loads(config)
        return reader(settings)(settings, _stored(model, revision))
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error


def _stored(model: str, revision: str | None) -> dict[str, Stored]:
    if Path(model).is_dir():
        return read_folder(Path(model))
    metadata = get_safetensors_params_metadata(model, revision=revision)
    if not metadata:
        raise ValueError("no .safetensors file; superl8 reads quantised checkpoints from these only")
    return {name: Stored(name, of["dtype"], tuple(of["shape"]), model) for name, of in metadata.items()}


class Source:
    """Matrices by vLLM's module names, which the mapper of a model class turns the checkpoint's into."""

    def __init__(self, matrices: dict[str, Matrix]):
        self.matrices = dict(matrices)

    def rename(self, mapper) -> None:
        """Apply a WeightsMapper. Mappers see names of tensors, so modules get the name of one."""
        renamed = {mapper.map_name(f"{name}.weight"): matrix for name, matrix in self.matrices.items()}
        self.matrices = {name.removesuffix(".weight"): matrix for name, matrix in renamed.items() if name is not None}

    def parts(self, prefix: str, packed: dict[str, list[str]]) -> list[Matrix | None]:
        """The matrices that the layer at `prefix` consists of; None for one that the checkpoint has not quantised."""
        parent, _, own = prefix.rpartition(".")
        if prefix in self.matrices or own not in packed:
            return [self.matrices.get(prefix)]
        return [self.matrices.get(f"{parent}.{part}" if parent else part) for part in packed[own]]

    def experts(self, prefix: str) -> list[Matrix]:
        """The matrices of the experts at `prefix`, whose names go on with a number."""
        start = f"{prefix}."
        return [
            matrix
            for name, matrix in self.matrices.items()
            if name.startswith(start) and name[len(start) :].partition(".")[0].isdigit()
        ]
