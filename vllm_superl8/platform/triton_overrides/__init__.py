# SPDX-License-Identifier: BSD-3-Clause
"""Torch code in the place of the Triton kernels that vLLM launches, for where there is no Triton.

Each function stands for a whole launch and has the kernel's parameters by name, tensors in place of pointers. None of
them waits for the GPU.
"""

from collections.abc import Callable

from vllm_superl8.platform.triton_overrides import drafting, models, rejection, worker


def overrides(device: str) -> dict[str, Callable]:
    """Kernel path in vLLM 0.33 -> function on "cpu" or "cuda", for vllm.triton_utils.dispatcher.register_kernels."""
    on_cuda = device == "cuda"
    utils, sampler, layers = "vllm.v1.spec_decode.utils.", "vllm.v1.sample.rejection_sampler.", "vllm.model_executor."
    found = {
        "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": worker.compute_slot_mapping,
        "vllm.v1.worker.utils._zero_kv_blocks_kernel": (
            worker.zero_kv_blocks_cuda if on_cuda else worker.zero_kv_blocks
        ),
        "vllm.v1.worker.mamba_utils.batch_memcpy_kernel": worker.batch_memcpy_cuda if on_cuda else worker.batch_memcpy,
        utils + "eagle_step_slot_mapping_metadata_kernel": drafting.eagle_step_slot_mapping_metadata,
        utils + "eagle_prepare_inputs_padded_kernel": drafting.eagle_prepare_inputs_padded,
        utils + "eagle_prepare_next_token_padded_kernel": drafting.eagle_prepare_next_token_padded,
        utils + "copy_and_expand_eagle_inputs_kernel": drafting.copy_and_expand_eagle_inputs,
        utils + "copy_and_expand_dflash_inputs_kernel": drafting.copy_and_expand_dflash_inputs,
        sampler + "rejection_greedy_sample_kernel": rejection.rejection_greedy_sample,
        sampler + "rejection_random_sample_kernel": rejection.rejection_random_sample,
        sampler + "expand_kernel": rejection.expand,
        sampler + "sample_recovered_tokens_kernel": rejection.sample_recovered_tokens,
    }
    if on_cuda:
        found |= {layers + name: function for name, function in models.OVERRIDES.items()}
    return found
