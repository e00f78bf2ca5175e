# SPDX-License-Identifier: BSD-3-Clause
"""Torch code in the place of the Triton kernels that vLLM launches, for where there is no Triton.

Each function stands for a whole launch and has the kernel's parameters by name, tensors in place of pointers. What
runs in a decode step without drafting does not wait for the GPU; the speculative-decoding ones do (their loops need
lengths on the host), which costs a fraction of a millisecond a step.
"""

import ctypes
import itertools
from collections.abc import Callable

import torch

from vllm_superl8.ops import registry


def overrides(device: str) -> dict[str, Callable]:
    """Kernel path in vLLM 0.33 -> function, for ``vllm.triton_utils.dispatcher.register_kernels``."""
    drafting, rejection = "vllm.v1.spec_decode.utils.", "vllm.v1.sample.rejection_sampler."
    return {
        "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping,
        "vllm.v1.worker.utils._zero_kv_blocks_kernel": zero_kv_blocks if device == "cpu" else zero_kv_blocks_cuda,
        "vllm.v1.worker.mamba_utils.batch_memcpy_kernel": batch_memcpy if device == "cpu" else batch_memcpy_cuda,
        drafting + "eagle_step_slot_mapping_metadata_kernel": eagle_step_slot_mapping_metadata,
        drafting + "eagle_prepare_inputs_padded_kernel": eagle_prepare_inputs_padded,
        drafting + "eagle_prepare_next_token_padded_kernel": eagle_prepare_next_token_padded,
        drafting + "copy_and_expand_eagle_inputs_kernel": copy_and_expand_eagle_inputs,
        drafting + "copy_and_expand_dflash_inputs_kernel": copy_and_expand_dflash_inputs,
        rejection + "rejection_greedy_sample_kernel": rejection_greedy_sample,
        rejection + "rejection_random_sample_kernel": rejection_random_sample,
        rejection + "expand_kernel": expand,
        rejection + "sample_recovered_tokens_kernel": sample_recovered_tokens,
    }


def compute_slot_mapping(
    num_tokens, max_num_tokens, query_start_loc_ptr, positions_ptr, block_table_ptr, block_table_stride,
    slot_mapping_ptr, KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1,
    PAD_ID=-1, BLOCK_SIZE=1024,
):  # fmt: skip
    positions = positions_ptr[:num_tokens]
    tokens = torch.arange(num_tokens, device=positions.device, dtype=query_start_loc_ptr.dtype)
    requests = torch.searchsorted(query_start_loc_ptr, tokens, right=True) - 1
    requests = requests.clamp(0, block_table_ptr.shape[0] - 1)
    ranks, interleave = TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    block, offset = positions // (KV_CACHE_BLOCK_SIZE * ranks), positions % (KV_CACHE_BLOCK_SIZE * ranks)
    slots = block_table_ptr[requests, block].long() * KV_CACHE_BLOCK_SIZE
    slots += offset // (ranks * interleave) * interleave + offset % interleave
    if ranks > 1:
        slots = torch.where(offset // interleave % ranks == TOTAL_CP_RANK, slots, PAD_ID)
    slot_mapping_ptr[:num_tokens] = slots
    slot_mapping_ptr[num_tokens:max_num_tokens] = PAD_ID


def zero_kv_blocks(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE=None):
    """Strides and sizes count 32-bit words."""
    segments = zip(seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True)
    blocks = block_ids_ptr.tolist()
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


def zero_kv_blocks_cuda(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE=None):
    _compiled("zeroing new KV pages").zero_pages(
        *map(registry.ptr, (seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr)),
        seg_addrs_ptr.numel(),
        block_ids_ptr.numel(),
        seg_block_strides_ptr.element_size() == 8,
        registry.stream(block_ids_ptr),
    )


def batch_memcpy(src_ptrs, dst_ptrs, sizes, BLOCK_SIZE=None):
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def batch_memcpy_cuda(src_ptrs, dst_ptrs, sizes, BLOCK_SIZE=None):
    module, stream = _compiled("copying recurrent states"), registry.stream(src_ptrs)
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        module.copy_async(target, source, size, stream)


def _compiled(what: str):
    if registry.COMPILED is None:
        raise RuntimeError(f"{what} without Triton needs the compiled module: {registry.NO_KERNELS_REASON}")
    return registry.COMPILED


def eagle_step_slot_mapping_metadata(
    positions_ptr, block_table_ptr, block_table_stride, seq_lens_ptr, out_clamped_positions_ptr, out_slot_mapping_ptr,
    block_size, max_model_len, n_blocks_per_req, PAD_ID, batch_size=None,
):  # fmt: skip
    batch = positions_ptr.shape[0] if batch_size is None else batch_size
    position = positions_ptr[:batch] + 1
    beyond = position >= max_model_len
    position = torch.where(beyond, 0, position)
    block = (position // block_size).clamp_max(n_blocks_per_req - 1)
    block_id = block_table_ptr[:batch].gather(1, block.long().unsqueeze(1)).squeeze(1)
    out_clamped_positions_ptr[:batch] = position
    out_slot_mapping_ptr[:batch] = torch.where(beyond, PAD_ID, block_id.long() * block_size + position % block_size)
    out_slot_mapping_ptr[batch:] = PAD_ID
    seq_lens = seq_lens_ptr[:batch]
    seq_lens_ptr[:batch] = torch.where(beyond, 1, seq_lens + 1).clamp_max(max_model_len).to(seq_lens.dtype)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens_ptr, valid_sampled_tokens_count_ptr, query_start_loc_gpu_ptr, token_indices_to_sample_ptr,
    num_rejected_tokens_gpu_ptr, num_reqs,
):  # fmt: skip
    ends = cu_num_draft_tokens_ptr[:num_reqs]
    drafted = torch.diff(ends, prepend=ends.new_zeros(1))
    rejected = torch.where(drafted > 0, drafted + 1 - valid_sampled_tokens_count_ptr[:num_reqs], 0)
    last = query_start_loc_gpu_ptr[1 : num_reqs + 1] - 1
    token_indices_to_sample_ptr[:num_reqs] = (last - rejected).to(token_indices_to_sample_ptr.dtype)
    num_rejected_tokens_gpu_ptr[:num_reqs] = rejected.to(num_rejected_tokens_gpu_ptr.dtype)


def eagle_prepare_next_token_padded(
    sampled_token_ids_ptr, discard_request_mask_ptr, backup_next_token_ids_ptr, next_token_ids_ptr,
    valid_sampled_tokens_count_ptr, vocab_size, num_sampled_tokens_per_req, num_reqs, stride_sampled_token_ids=None,
    BLOCK_SIZE_TOKENS=None,
):  # fmt: skip
    tokens = sampled_token_ids_ptr[:num_reqs, :num_sampled_tokens_per_req]
    valid = (tokens != -1) & (tokens < vocab_size) & ~discard_request_mask_ptr[:num_reqs].unsqueeze(1)
    count = valid.sum(1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(valid, places, -1).amax(1).clamp_min(0)
    last_token = tokens.gather(1, last.unsqueeze(1)).squeeze(1)
    following = torch.where(count > 0, last_token.long(), backup_next_token_ids_ptr[:num_reqs].long())
    next_token_ids_ptr[:num_reqs] = following.to(next_token_ids_ptr.dtype)
    valid_sampled_tokens_count_ptr[:num_reqs] = count.to(valid_sampled_tokens_count_ptr.dtype)


def copy_and_expand_eagle_inputs(
    target_token_ids_ptr, target_positions_ptr, next_token_ids_ptr, out_input_ids_ptr, out_positions_ptr,
    out_is_rejected_token_mask_ptr, out_is_masked_token_mask_ptr, out_new_token_indices_ptr,
    out_hidden_state_mapping_ptr, query_start_loc_ptr, query_end_loc_ptr, padding_token_id, parallel_drafting_token_id,
    total_input_tokens, num_padding_slots_per_request, shift_input_ids, BLOCK_SIZE_TOKENS=None,
):  # fmt: skip
    """A request's tokens, its new token, drafting slots and places of rejected tokens, one after the other."""
    slots, shift = num_padding_slots_per_request, int(bool(shift_input_ids))
    starts, ends = query_start_loc_ptr.tolist(), query_end_loc_ptr.tolist()
    for request, end in enumerate(ends):
        start, following = starts[request], starts[request + 1]
        valid = end - start + 1 - shift
        rejected = following - end - 1
        out = start + request * (slots - shift)
        total = valid + slots + rejected
        span, new = slice(out, out + total), slice(out + valid, out + valid + slots)
        source = torch.arange(start + shift, start + shift + valid).clamp_max(total_input_tokens - 1)
        ids = torch.full((total,), padding_token_id, dtype=out_input_ids_ptr.dtype)
        ids[:valid] = target_token_ids_ptr[source.to(target_token_ids_ptr.device)].to(ids)
        ids[valid] = int(next_token_ids_ptr[request])
        ids[valid + 1 : valid + slots] = parallel_drafting_token_id
        out_input_ids_ptr[span] = ids.to(out_input_ids_ptr.device)
        positions = torch.arange(total) + int(target_positions_ptr[start])
        positions[valid + slots :] = 0
        out_positions_ptr[span] = positions.to(out_positions_ptr)
        out_is_rejected_token_mask_ptr[span] = False
        out_is_rejected_token_mask_ptr[out + valid + slots : out + total] = True
        out_is_masked_token_mask_ptr[span] = False
        out_is_masked_token_mask_ptr[out + valid + 1 : out + valid + slots] = True
        out_new_token_indices_ptr[request * slots : (request + 1) * slots] = torch.arange(new.start, new.stop).to(
            out_new_token_indices_ptr
        )
        if shift_input_ids:
            places = torch.arange(out, out + following - start)
            out_hidden_state_mapping_ptr[start:following] = places.to(out_hidden_state_mapping_ptr)


def copy_and_expand_dflash_inputs(
    next_token_ids_ptr, target_positions_ptr, out_input_ids_ptr, out_context_positions_ptr, out_query_positions_ptr,
    out_context_slot_mapping_ptr, out_query_slot_mapping_ptr, out_token_indices_ptr, block_table_ptr,
    block_table_stride, query_start_loc_ptr, num_rejected_tokens_ptr, parallel_drafting_token_id, block_size,
    num_query_per_req, num_speculative_tokens, total_input_tokens, BLOCK_SIZE=None, HAS_NUM_REJECTED=False,
):  # fmt: skip
    """Context positions and slots, then the new token and masks that a DFlash draft attends from."""
    starts = query_start_loc_ptr.tolist()
    device = target_positions_ptr.device
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        rejected = int(num_rejected_tokens_ptr[request]) if HAS_NUM_REJECTED else 0
        context = target_positions_ptr[start:end]
        first = int(target_positions_ptr[end - rejected - 1]) + 1
        query = torch.arange(first, first + num_query_per_req, device=device)

        def slot(positions, request=request):
            block = (positions // block_size).clamp_max(block_table_stride - 1).long()
            return block_table_ptr[request][block].long() * block_size + positions % block_size

        out = slice(request * num_query_per_req, (request + 1) * num_query_per_req)
        out_context_positions_ptr[start:end] = context
        out_context_slot_mapping_ptr[start:end] = slot(context)
        out_query_positions_ptr[out] = query.to(out_query_positions_ptr.dtype)
        out_query_slot_mapping_ptr[out] = slot(query)
        out_input_ids_ptr[out] = parallel_drafting_token_id
        out_input_ids_ptr[out.start] = next_token_ids_ptr[request]
        sampled = num_query_per_req - 1
        first_out = request * num_speculative_tokens
        out_token_indices_ptr[first_out : first_out + sampled] = torch.arange(
            out.start + 1, out.stop, device=device, dtype=out_token_indices_ptr.dtype
        )


def _drafts(cu_num_draft_tokens):
    """(request, first draft, one past the last) of each request."""
    ends = cu_num_draft_tokens.tolist()
    return [(request, start, end) for request, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def rejection_greedy_sample(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, target_argmax_ptr, bonus_token_ids_ptr,
    is_greedy_ptr, max_spec_len, uniform_probs_ptr=None, synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False,
):  # fmt: skip
    out = output_token_ids_ptr.view(-1, max_spec_len + 1)
    greedy = None if is_greedy_ptr is None else is_greedy_ptr.tolist()
    drafts, targets, bonus = draft_token_ids_ptr.tolist(), target_argmax_ptr.tolist(), bonus_token_ids_ptr.tolist()
    for request, start, end in _drafts(cu_num_draft_tokens_ptr):
        if greedy is not None and not greedy[request]:
            continue
        row = []
        for place in range(start, end):
            if SYNTHETIC_MODE:
                rate = float(synthetic_conditional_rates_ptr[place - start])
                accepted = drafts[place] >= 0 and float(uniform_probs_ptr[place]) < rate
                row.append(drafts[place] if accepted else targets[place])
            else:
                accepted = drafts[place] == targets[place]
                row.append(targets[place])
            if not accepted:
                break
        else:
            row.append(_scalar(bonus[request]))
        out[request, : len(row)] = torch.tensor(row, dtype=out.dtype, device=out.device)


def rejection_random_sample(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, draft_probs_ptr, target_probs_ptr,
    bonus_token_ids_ptr, recovered_token_ids_ptr, uniform_probs_ptr, is_greedy_ptr, max_spec_len, vocab_size,
    synthetic_conditional_rates_ptr=None, NO_DRAFT_PROBS=False, SYNTHETIC_MODE=False,
):  # fmt: skip
    out = output_token_ids_ptr.view(-1, max_spec_len + 1)
    greedy, bonus = is_greedy_ptr.tolist(), bonus_token_ids_ptr.tolist()
    drafts, recovered = draft_token_ids_ptr.tolist(), recovered_token_ids_ptr.tolist()
    for request, start, end in _drafts(cu_num_draft_tokens_ptr):
        if greedy[request]:
            continue
        row = []
        for place in range(start, end):
            token, uniform = drafts[place], float(uniform_probs_ptr[place])
            if token < 0:
                accepted = False
            elif SYNTHETIC_MODE:
                accepted = uniform < float(synthetic_conditional_rates_ptr[place - start])
            else:
                draft_prob = 1.0 if NO_DRAFT_PROBS else float(draft_probs_ptr[place, token])
                accepted = draft_prob > 0 and float(target_probs_ptr[place, token]) / draft_prob >= uniform
            row.append(token if accepted else recovered[place])
            if not accepted:
                break
        else:
            row.append(_scalar(bonus[request]))
        out[request, : len(row)] = torch.tensor(row, dtype=out.dtype, device=out.device)


def _scalar(value):
    """Bonus tokens come as (requests) or (requests, 1)."""
    return value[0] if isinstance(value, list) else value


def expand(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to, MAX_NUM_TOKENS=None):
    values = torch.where(input_ptr == replace_from, torch.as_tensor(replace_to, dtype=input_ptr.dtype), input_ptr)
    for request, start, end in _drafts(cu_num_tokens_ptr):
        output_ptr[start:end] = values[request]


def sample_recovered_tokens(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, draft_probs_ptr, target_probs_ptr, inv_q_ptr,
    vocab_size, BLOCK_SIZE=None, NO_DRAFT_PROBS=False, USE_FP64_GUMBEL=False,
):  # fmt: skip
    for request, start, end in _drafts(cu_num_draft_tokens_ptr):
        for place in range(start, end):
            if NO_DRAFT_PROBS:
                prob = target_probs_ptr[place].clone()
                prob[draft_token_ids_ptr[place].clamp_min(0)] *= draft_token_ids_ptr[place] < 0
            else:
                prob = (target_probs_ptr[place] - draft_probs_ptr[place]).clamp_min(0)
            output_token_ids_ptr[place] = (prob * inv_q_ptr[request]).argmax().to(output_token_ids_ptr.dtype)
