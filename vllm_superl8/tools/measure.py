# SPDX-License-Identifier: BSD-3-Clause
"""Timing on the GPU: a card's ceilings, and kernels with cold operands replayed from a CUDA graph.

Times come from CUDA events. Everything runs on the current device.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_superl8.ops import registry

PROBE_THREADS = 256
BLOCKS_PER_SM = 8
DP4A_STEPS = 1 << 14
DP4A_OPERATIONS_PER_STEP = 16 * 8
"""Of a thread: 16 chains of four multiplications and four additions."""

READ_BYTES = 1 << 30
MATMUL_SIZE = 4096
MAX_COPIES = 128
"""Most copies of an operand; 128 launches of a few microseconds are a millisecond, long against an event's jitter."""


@dataclass(frozen=True)
class Row:
    """One measurement of a benchmark.

    fields      what was measured: op, and format, m, n, k or batch, context, q_len, ... (see tools.results)
    us          microseconds a call
    operations  multiplications and additions a call, None if the op's work is not arithmetic
    bytes       bytes of device memory that a call must move at least
    error       relative error against the reference, on the operands that were timed
    """

    fields: dict[str, object]
    us: float
    operations: int | None
    bytes: int
    error: float


@dataclass(frozen=True)
class Ceilings:
    """What a card can do at most: dp4a in 10^12 integer operations a second, reads of its memory in 10^9 bytes."""

    dp4a_tops: float
    hbm_gbps: float


def ceilings() -> Ceilings:
    """Measure both, in some tens of milliseconds. Raises RuntimeError without the compiled kernels."""
    return Ceilings(dp4a_tops(), hbm_gbps())


def dp4a_tops() -> float:
    """Rate of dp4a from registers, 10^12 operations a second, best of five launches."""
    blocks = _probe_blocks()
    out = torch.empty(blocks * PROBE_THREADS, dtype=torch.int32, device="cuda")
    best = min(_event_ms(lambda: _probes().probe_dp4a(out.data_ptr(), blocks, DP4A_STEPS, _stream()), 5))
    return out.numel() * DP4A_STEPS * DP4A_OPERATIONS_PER_STEP / best / 1e9


def hbm_gbps() -> float:
    """Rate of reading device memory, 10^9 bytes a second, best of ten passes over 1 GiB (or half of what is free)."""
    free_bytes, _ = torch.cuda.mem_get_info()
    num_words = min(READ_BYTES, free_bytes // 2) // 16 * 4
    words = torch.empty(num_words, dtype=torch.int32, device="cuda")
    blocks = _probe_blocks()
    out = torch.empty(blocks * PROBE_THREADS, dtype=torch.int32, device="cuda")
    read = lambda: _probes().probe_read(out.data_ptr(), words.data_ptr(), num_words, blocks, _stream())  # noqa: E731
    return 4 * num_words / min(_event_ms(read, 10)) / 1e6


def fp16_tflops() -> float:
    """Rate of torch's fp16 matrix product (tensor cores where they work), 10^12 operations a second, best of three."""
    a, b = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
    return 2 * MATMUL_SIZE**3 / min(_event_ms(lambda: torch.mm(a, b), 3)) / 1e9


def cold_copies(operand_bytes: int) -> int:
    """How many copies of an operand to take in turn, so that none is still in the L2 cache when it is read again."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(MAX_COPIES, math.ceil(3 * l2_bytes / operand_bytes)))


def time_us(calls: Sequence[Callable[[], object]], budget_ms: float = 200.0) -> float:
    """Median time of one call in microseconds: all calls in turn as one CUDA graph, replayed for about budget_ms.

    calls  the same work on different copies of its operands (see cold_copies); they may not synchronise
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # loads images and fills the allocator, which a capture may not do
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    first = _event_ms(graph.replay, 1)[0]
    times = _event_ms(graph.replay, max(5, min(200, int(budget_ms / first))))
    return 1e3 * statistics.median(times) / len(calls)


def _event_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls, after one that is not counted."""
    call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def _probes():
    if registry.COMPILED is None:
        raise RuntimeError(f"measure: the compiled kernels are missing: {registry.NO_KERNELS_REASON}")
    return registry.COMPILED


def _probe_blocks() -> int:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return BLOCKS_PER_SM * properties.multi_processor_count


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
