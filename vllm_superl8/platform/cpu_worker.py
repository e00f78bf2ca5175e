# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's CPU worker, with what pipeline parallelism lacks there.

vLLM 0.33 allocates a later stage's receive buffers in the warm-up run, which its CPU runner skips when nothing is
compiled; every later stage then fails. They are allocated here after the model is loaded.
"""

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class Superl8CpuWorker(CPUWorker):
    """CPUWorker whose later pipeline stages own their receive buffers."""

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
