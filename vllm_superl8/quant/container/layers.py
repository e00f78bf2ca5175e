# SPDX-License-Identifier: BSD-3-Clause
"""Which tensors of a ``.superl8`` file make up a layer of vLLM's, and how that layer is to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from vllm_superl8.checkpoint.superl8_header import Blob, Container, read_header
from vllm_superl8.formats.container import INT8, ROW_SCALED, SCHEMES, SUFFIX, columns
from vllm_superl8.formats.int4 import GROUP_SIZES as INT4_GROUP_SIZES
from vllm_superl8.formats.layout import GGML
from vllm_superl8.quant.container.engine_args import LOAD_FORMAT
from vllm_superl8.quant.options import ACTIVATIONS, GROUP_SIZE

logger = init_logger(__name__)

WEIGHT = ".weight"
INNER = ".routed_experts"
"""What vLLM adds to the name of a layer's experts."""


@dataclass(frozen=True)
class Stored:
    """How a layer is stored.

    kind          "raw": 16 bit. "int8", "int4": its codes are multiplied as they are. "blocks": so are its GGUF blocks.
                  "other": quantised otherwise, or in parts that do not fit together; dequantised at load
    names         tensors of the file that it takes
    group_sizes   of int8 and int4 codes, by the last part of the module's name (for example "down_proj"); -1 is a
                  scale a row
    """

    kind: str
    names: tuple[str, ...]
    group_sizes: dict[str, int]


class Layers:
    """The matrices of a file by the names that vLLM's modules have.

    mapper   the model's mapping from checkpoint names to its own, or None
    """

    def __init__(self, header: Container, mapper: Any = None):
        self.header = header
        scales = header.scales
        names = [name for name in header.tensors if name.endswith(WEIGHT) and name not in scales]
        renamed = {name: name for name in names}
        if mapper is not None:
            renamed = mapper.apply_dict(renamed)
        self._by_module = {module.removesuffix(WEIGHT): name for module, name in renamed.items()}

    def linear(self, prefix: str, packed: dict[str, list[str]]) -> Stored:
        """How the linear layer at `prefix` is stored; packed: name of a fused module to those of its parts."""
        parent, _, last = prefix.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in packed.get(last, [last])]
        return self._stored(prefix, [self._by_module[part] for part in parts if part in self._by_module])

    def experts(self, prefix: str) -> Stored:
        """How the experts at `prefix` are stored."""
        start = prefix.removesuffix(INNER) + "."
        return self._stored(prefix, [name for module, name in self._by_module.items() if module.startswith(start)])

    def _stored(self, prefix: str, names: list[str]) -> Stored:
        blobs = [self.header.tensors[name] for name in names]
        if all(blob.scheme == "raw" for blob in blobs):
            return Stored("raw", tuple(names), {})
        kinds, group_sizes = {_kind(blob) for blob in blobs}, {}
        for blob in blobs:
            part = blob.name.removesuffix(WEIGHT).rpartition(".")[2]
            if group_sizes.setdefault(part, _group_size(blob)) != _group_size(blob):
                kinds.add("other")
        if len(kinds) > 1 or "other" in kinds:
            return Stored("other", tuple(names), {})
        return Stored(kinds.pop(), tuple(names), group_sizes)


def _kind(blob: Blob) -> str:
    """Which kernel takes the codes as they are, if any."""
    if blob.rotated or blob.scheme == "raw":
        return "other"
    if blob.scheme in ROW_SCALED or (blob.scheme in INT8 and blob.group_size == GROUP_SIZE):
        return "int8"
    if blob.scheme == "per_group_i4" and blob.codebook == "int4" and blob.group_size in INT4_GROUP_SIZES:
        return "int4" if columns(blob.scheme, blob.shape[1]) % blob.group_size == 0 else "other"
    if blob.scheme == "gguf_kquant" and blob.codebook.upper() in GGML:
        return "blocks" if blob.shape[1] % GGML[blob.codebook.upper()].bytes == 0 else "other"
    return "other"


def _group_size(blob: Blob) -> int:
    return blob.group_size if SCHEMES[blob.scheme].grouped else -1


def layers_in_force(mapper: Any) -> Layers | None:
    """The layers of the ``.superl8`` file that is being loaded, None when it is something else."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or config.load_config.load_format != LOAD_FORMAT:
        return None
    if not config.model_config.model_weights:
        raise ValueError(f"load format {LOAD_FORMAT} reads {SUFFIX} files only, {config.model_config.model} is none")
    return Layers(read_header(Path(config.model_config.model_weights)), mapper)


def group_size_of(stored: dict[str, int], activation: str, prefix: str) -> int:
    """The group size that a layer runs with, from those of its parts and the option `activation`.

    Raises ValueError where the option asks for a scale a row and the codes have groups.
    """
    group_size = max(stored.values())
    if activation == "auto" or ACTIVATIONS[activation] == group_size:
        return group_size
    if group_size != -1:
        raise ValueError(
            f"superl8: {prefix} is stored in groups of {group_size}, which activation={activation!r} cannot use; leave "
            "the option out, or convert the model with --group -1"
        )
    return ACTIVATIONS[activation]
