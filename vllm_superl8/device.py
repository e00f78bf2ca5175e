# SPDX-License-Identifier: BSD-3-Clause
"""Which NVIDIA cards are visible and what they can do, asked once through NVML, without touching CUDA.

Nothing here initialises CUDA, except multiprocessors() of a CUDA device: the answers are needed in processes that fork
later.
"""

import os
from dataclasses import dataclass
from functools import cache

import pynvml


@dataclass(frozen=True)
class Card:
    """One visible GPU: NVML index, product name, compute capability, bytes of memory."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int


DP4A_CAPABILITIES = ((6, 1), (7, 0), (7, 2))
"""Capabilities that this package's kernels are made for. 6.0 (P100) has no dp4a; 7.5 and later stock vLLM serves."""

V100_MULTIPROCESSORS = 80


@cache
def cards() -> tuple[Card, ...]:
    """The visible GPUs in CUDA_VISIBLE_DEVICES order; empty where there is no driver or no GPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_card(handle) for handle in _visible_handles())
    finally:
        pynvml.nvmlShutdown()


def _visible_handles():
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    handles = []
    for device in filter(None, (part.strip() for part in wanted.split(","))):
        try:
            if device.lstrip("-").isdigit():
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(device)))
            else:
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(device))
        except pynvml.NVMLError:
            break  # as CUDA: the first device that does not exist hides the rest
    return handles


def _card(handle) -> Card:
    name = pynvml.nvmlDeviceGetName(handle)
    return Card(
        index=pynvml.nvmlDeviceGetIndex(handle),
        name=name.decode() if isinstance(name, bytes) else name,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


@cache
def driver_version() -> str:
    """Version of NVIDIA's driver, such as 580.65.06. Raises pynvml.NVMLError where there is none."""
    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return version if isinstance(version, str) else version.decode()


@cache
def multiprocessors(device) -> int:
    """Multiprocessors of a torch.device that holds tensors: CUDA is in use by then. For the CPU a V100's (emulator)."""
    if device.type != "cuda":
        return V100_MULTIPROCESSORS
    import torch  # the rest of this file answers without it

    return torch.cuda.get_device_properties(device).multi_processor_count
