# SPDX-License-Identifier: BSD-3-Clause
"""A quantised weight matrix as a checkpoint stores it: what its scheme says of it, and its decoded parts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_superl8.checkpoint.safetensors_header import Stored


@dataclass(frozen=True)
class Codes:
    """value[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]), where g is the group of column k.

    codes     (n, k) int8 or uint8
    scales    (n, groups) float32
    zeros     (n, groups) integers, or None: zeros
    group_of  (k) int64: the group of each column, or None: groups of k / groups columns, in order
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    def per_column(self, of_groups: torch.Tensor) -> torch.Tensor:
        """(n, groups) -> (n, k)."""
        k, groups = self.codes.shape[1], self.scales.shape[1]
        if self.group_of is not None:
            return of_groups[:, self.group_of]
        return of_groups.repeat_interleave(-(-k // groups), dim=1)[:, :k]

    def values(self) -> torch.Tensor:
        """(n, k) float32."""
        codes = self.codes.float()
        if self.zeros is not None:
            codes -= self.per_column(self.zeros.float())
        return codes * self.per_column(self.scales)

    def in_order(self) -> tuple["Codes", torch.Tensor | None]:
        """The same with columns sorted by their group, and which column each of them was; (self, None) if they are.

        Groups of different sizes have no order of equal groups: (self, None) too, with group_of kept.
        """
        if self.group_of is None:
            return self, None
        k, groups = self.codes.shape[1], self.scales.shape[1]
        if k % groups or (torch.bincount(self.group_of, minlength=groups) != k // groups).any():
            return self, None
        columns = torch.argsort(self.group_of, stable=True)
        if torch.equal(columns, torch.arange(k, device=columns.device)):
            return Codes(self.codes, self.scales, self.zeros), None
        return Codes(self.codes[:, columns], self.scales, self.zeros), columns


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weight (n, k) before it is read.

    name        module path in the checkpoint
    shape       (n, k), None where only the tensors' contents say it
    scheme      in words, for the log
    bits        of its codes; 0: stored as floating point of some kind
    group_size  columns that share a scale; -1: the whole row
    tensors     names of the tensors that `decode` needs, each without the module's path
    decode      {name without the path: tensor} -> Codes, or (n, k) float32 values
    zeros       codes have zero points
    ordered     columns of a group are not neighbours (activation order)
    shifted     the checkpoint quantises its activations around a zero point
    half_scales scales are stored in fp16
    """

    name: str
    shape: tuple[int, int] | None
    scheme: str
    bits: int
    group_size: int
    tensors: tuple[str, ...]
    decode: Callable[[dict[str, torch.Tensor]], Codes | torch.Tensor]
    zeros: bool = False
    ordered: bool = False
    shifted: bool = False
    half_scales: bool = False


def group_count(k: int, group_size: int, name: str) -> int:
    """Groups of a row of k columns; group_size -1 is the row. Raises ValueError, naming the module, for other sizes."""
    if group_size == -1:
        return 1
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"{name}: group size {group_size!r} of the configuration, wanted -1 or a positive number")
    if k % group_size:
        raise ValueError(f"{name}: groups of {group_size} columns do not divide its rows of {k}")
    return k // group_size


def needed(stored: dict[str, Stored], module: str, suffix: str, why: str) -> Stored:
    """Tensor module.suffix. Raises ValueError naming it if there is none."""
    name = f"{module}.{suffix}"
    if name not in stored:
        raise ValueError(f"tensor {name} is missing from the checkpoint ({why})")
    return stored[name]


def two_dims(tensor: Stored) -> tuple[int, int]:
    """Its rows and columns. Raises ValueError naming it if it is no matrix, such as experts stored as one tensor."""
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor} has shape {list(tensor.shape)}, wanted a matrix")
    return tensor.shape
