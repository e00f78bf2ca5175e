# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM's drafting (EAGLE, MTP, DFlash) does by Triton kernels: inputs of the draft model, tokens to go on from."""

import torch


def _owners(starts: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the requests that start at `starts` (ascending, from 0 on) each of `count` places belongs to."""
    places = torch.arange(count, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts, places, right=True) - 1


def eagle_step_slot_mapping_metadata(
    positions_ptr, block_table_ptr, block_table_stride, seq_lens_ptr, out_clamped_positions_ptr, out_slot_mapping_ptr,
    block_size, max_model_len, n_blocks_per_req, PAD_ID, batch_size=None,
):  # fmt: skip
    """One token on: its position, slot and sequence length. A request at its end starts over at position 0, unsaved."""
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
    """How many drafts of each request were rejected, and which of its tokens is the last valid one."""
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
    """The last valid sampled token of each request, or its backup where there is none or the request is discarded."""
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
    """For each request, one after the other: its valid tokens, the new one, masks to draft at, rejected tokens.

    With shift_input_ids the first valid token is left out, and each input token's place is noted for its hidden state.
    """
    slots, shift = num_padding_slots_per_request, int(bool(shift_input_ids))
    ends = query_end_loc_ptr
    batch, device = ends.shape[0], ends.device
    starts = query_start_loc_ptr[:batch]
    valid = ends - starts + 1 - shift  # tokens of each request
    out_starts = starts + torch.arange(batch, device=device, dtype=starts.dtype) * (slots - shift)

    total = total_input_tokens + batch * (slots - shift)
    request = _owners(out_starts, total)
    place = torch.arange(total, device=device) - out_starts[request]  # within the request
    beyond = place - valid[request]  # from the new token on
    source = (starts[request] + shift + place).clamp(0, total_input_tokens - 1)
    is_new, is_mask, is_rejected = beyond == 0, (beyond > 0) & (beyond < slots), beyond >= slots
    ids = torch.where(is_new, next_token_ids_ptr[request], target_token_ids_ptr[source])
    ids = torch.where(is_mask, parallel_drafting_token_id, torch.where(is_rejected, padding_token_id, ids))
    positions = torch.where(is_rejected, 0, target_positions_ptr[starts[request]] + place)
    out_input_ids_ptr[:total] = ids.to(out_input_ids_ptr.dtype)
    out_positions_ptr[:total] = positions.to(out_positions_ptr.dtype)
    out_is_rejected_token_mask_ptr[:total] = is_rejected
    out_is_masked_token_mask_ptr[:total] = is_mask

    new = (out_starts + valid).unsqueeze(1) + torch.arange(slots, device=device)
    out_new_token_indices_ptr[: batch * slots] = new.flatten().to(out_new_token_indices_ptr.dtype)
    if shift:
        owner = _owners(starts, total_input_tokens)
        places = torch.arange(total_input_tokens, device=device) + (out_starts - starts)[owner]
        out_hidden_state_mapping_ptr[:total_input_tokens] = places.to(out_hidden_state_mapping_ptr.dtype)


def copy_and_expand_dflash_inputs(
    next_token_ids_ptr, target_positions_ptr, out_input_ids_ptr, out_context_positions_ptr, out_query_positions_ptr,
    out_context_slot_mapping_ptr, out_query_slot_mapping_ptr, out_token_indices_ptr, block_table_ptr,
    block_table_stride, query_start_loc_ptr, num_rejected_tokens_ptr, parallel_drafting_token_id, block_size,
    num_query_per_req, num_speculative_tokens, total_input_tokens, BLOCK_SIZE=None, HAS_NUM_REJECTED=False,
):  # fmt: skip
    """Positions and slots of the context, and of the queries that follow its last valid token: the new token, masks."""
    batch = next_token_ids_ptr.shape[0]
    device = target_positions_ptr.device
    starts, following = query_start_loc_ptr[:batch], query_start_loc_ptr[1 : batch + 1]

    def slots(request, positions):
        block = (positions // block_size).clamp_max(block_table_stride - 1).long()
        return block_table_ptr[request, block].long() * block_size + positions % block_size

    context = target_positions_ptr[:total_input_tokens]
    out_context_positions_ptr[:total_input_tokens] = context
    out_context_slot_mapping_ptr[:total_input_tokens] = slots(_owners(starts, total_input_tokens), context)

    last = following - 1 - num_rejected_tokens_ptr[:batch] if HAS_NUM_REJECTED else following - 1
    steps = torch.arange(num_query_per_req, device=device)
    positions = target_positions_ptr[last].unsqueeze(1) + 1 + steps
    count = batch * num_query_per_req
    out_query_positions_ptr[:count] = positions.flatten().to(out_query_positions_ptr.dtype)
    requests = torch.arange(batch, device=device).unsqueeze(1)
    out_query_slot_mapping_ptr[:count] = slots(requests, positions).flatten()
    ids = torch.where(steps == 0, next_token_ids_ptr.unsqueeze(1), parallel_drafting_token_id)
    out_input_ids_ptr[:count] = ids.flatten().to(out_input_ids_ptr.dtype)
    sampled = num_query_per_req - 1  # of num_speculative_tokens a request
    places = requests * num_query_per_req + steps[1:]
    out = out_token_indices_ptr[: batch * num_speculative_tokens].view(batch, num_speculative_tokens)
    out[:, :sampled] = places.to(out.dtype)
