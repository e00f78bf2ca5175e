# SPDX-License-Identifier: BSD-3-Clause
"""Fixture `kernels`: the kernels of the checkout, run by the emulator and, marked gpu, by a real card."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # else torch's threads of one worker wait for those of another
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    )

import torch

import emulator


@dataclass(frozen=True)
class Kernels:
    """Where kernels run.

    module  what an op's ``kernel(module, ...)`` takes: the emulator or vllm_superl8._C
    device  torch device of its tensors
    """

    name: str
    module: ModuleType
    device: torch.device

    def run(self, op: str, *args, **kwargs):
        """Call the kernel of a registered op with tensors of this device."""
        from vllm_superl8.ops.registry import OPS

        return OPS[op].kernel(self.module, *args, **kwargs)


def _cuda_kernels() -> Kernels:
    from vllm_superl8.ops import registry

    assert registry.COMPILED is not None, registry.NO_KERNELS_REASON
    return Kernels("cuda", registry.COMPILED, torch.device("cuda"))


def _emulated_kernels() -> Kernels:
    try:
        module = emulator.load()
    except Exception as error:  # every test would spend minutes on the same
        pytest.exit(f"the emulator does not build: {error}", returncode=1)
    module.emulator.set_order(os.environ.get("SUPERL8_EMULATOR_ORDER", "changing"))
    return Kernels("emulator", module, torch.device("cpu"))


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request) -> Iterator[Kernels]:
    """Kernels to test; new tensors are full of NaN (integers: their maximum), so that unwritten results show."""
    found = _emulated_kernels() if request.param == "emulator" else _cuda_kernels()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield found
    finally:
        torch.use_deterministic_algorithms(False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu are skipped where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="K/N runs the tests K, K + N, K + 2N, ... of those collected")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--part").split("/"))
    if step > 1:
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % step != first])
        items[:] = items[first::step]
