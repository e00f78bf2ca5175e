# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM's rejection sampler does by Triton kernels: which drafted tokens stand, and what replaces the first other.

Drafts of all requests lie one after the other; cu_num_draft_tokens (requests) holds where each request's end.
"""

import torch


def _by_request(cu_num_draft_tokens: torch.Tensor, max_spec_len: int, numbers: int):
    """Number of draft (requests, max_spec_len) in the flat lists, kept inside them, and which of them exist."""
    starts = torch.cat([cu_num_draft_tokens.new_zeros(1), cu_num_draft_tokens[:-1]])
    steps = torch.arange(max_spec_len, device=cu_num_draft_tokens.device)
    index = starts.unsqueeze(1) + steps
    return index.clamp_max(max(0, numbers - 1)).long(), index < cu_num_draft_tokens.unsqueeze(1)


def _store(output, chosen, tokens, accepted, exists, bonus):
    """Write tokens (requests, max_spec_len) up to and with the first not accepted, or all and then the bonus token.

    output (requests, max_spec_len + 1); chosen (requests) says whose rows are written.
    """
    goes_on = (accepted | ~exists).cumprod(1).bool()  # all up to here were accepted
    reached = torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], 1) & exists
    places = torch.arange(output.shape[1], device=output.device)
    count = exists.sum(1, keepdim=True)
    all_accepted = (accepted | ~exists).all(1, keepdim=True)
    is_bonus = (places == count) & all_accepted
    written = torch.nn.functional.pad(reached, (0, 1)) | is_bonus
    tokens = torch.where(is_bonus, bonus.view(-1, 1), torch.nn.functional.pad(tokens, (0, 1)))
    output.copy_(torch.where(written & chosen.view(-1, 1), tokens.to(output.dtype), output))


def _pick(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """flat[index]; zeros if there are no drafts at all."""
    return flat[index] if flat.numel() else index.new_zeros(index.shape)


def rejection_greedy_sample(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, target_argmax_ptr, bonus_token_ids_ptr,
    is_greedy_ptr, max_spec_len, uniform_probs_ptr=None, synthetic_conditional_rates_ptr=None, SYNTHETIC_MODE=False,
):  # fmt: skip
    """A draft stands if it is the target's choice (SYNTHETIC_MODE: at a given rate, for benchmarks)."""
    output = output_token_ids_ptr.view(-1, max_spec_len + 1)
    index, exists = _by_request(cu_num_draft_tokens_ptr, max_spec_len, draft_token_ids_ptr.shape[0])
    drafts, targets = _pick(draft_token_ids_ptr, index).long(), _pick(target_argmax_ptr, index).long()
    if SYNTHETIC_MODE:
        accepted = (_pick(uniform_probs_ptr, index) < synthetic_conditional_rates_ptr[:max_spec_len]) & (drafts >= 0)
        targets = torch.where(accepted, drafts, targets)
    else:
        accepted = drafts == targets
    chosen = is_greedy_ptr if is_greedy_ptr is not None else exists.new_ones(exists.shape[0])
    _store(output, chosen, targets, accepted, exists, bonus_token_ids_ptr.long())


def rejection_random_sample(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, draft_probs_ptr, target_probs_ptr,
    bonus_token_ids_ptr, recovered_token_ids_ptr, uniform_probs_ptr, is_greedy_ptr, max_spec_len, vocab_size,
    synthetic_conditional_rates_ptr=None, NO_DRAFT_PROBS=False, SYNTHETIC_MODE=False,
):  # fmt: skip
    """A draft stands with probability min(1, target / draft), else its recovered token (arXiv:2211.17192)."""
    output = output_token_ids_ptr.view(-1, max_spec_len + 1)
    index, exists = _by_request(cu_num_draft_tokens_ptr, max_spec_len, draft_token_ids_ptr.shape[0])
    drafts, uniform = _pick(draft_token_ids_ptr, index).long(), _pick(uniform_probs_ptr, index)
    if SYNTHETIC_MODE:
        accepted = uniform < synthetic_conditional_rates_ptr[:max_spec_len]
    elif not draft_token_ids_ptr.shape[0]:
        accepted = torch.zeros_like(exists)
    else:
        token = drafts.clamp_min(0)
        target = target_probs_ptr[index, token]
        drafted = torch.ones_like(target) if NO_DRAFT_PROBS else draft_probs_ptr[index, token]
        accepted = (drafted > 0) & (target / drafted >= uniform)
    accepted &= drafts >= 0  # -1 pads
    tokens = torch.where(accepted, drafts, _pick(recovered_token_ids_ptr, index).long())
    _store(output, ~is_greedy_ptr, tokens, accepted, exists, bonus_token_ids_ptr.long())


def _owners(cu_num_tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Request of each of `count` places."""
    places = torch.arange(count, device=cu_num_tokens.device, dtype=cu_num_tokens.dtype)
    return torch.searchsorted(cu_num_tokens, places, right=True).clamp_max(cu_num_tokens.shape[0] - 1)


def expand(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """A value of each request, repeated for each of its tokens; replace_from becomes replace_to."""
    values = torch.where(input_ptr == replace_from, replace_to, input_ptr).to(output_ptr.dtype)
    output_ptr.copy_(values[_owners(cu_num_tokens_ptr, output_ptr.shape[0])])


def sample_recovered_tokens(
    output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, draft_probs_ptr, target_probs_ptr, inv_q_ptr,
    vocab_size, BLOCK_SIZE=None, NO_DRAFT_PROBS=False, USE_FP64_GUMBEL=False,
):  # fmt: skip
    """A token for each draft, should it be rejected: drawn from what the target has beyond the draft's probability.

    inv_q (requests, vocab_size): reciprocals of exponential noise, so that the largest product is a draw.
    """
    numbers = output_token_ids_ptr.shape[0]
    if not numbers:
        return
    if NO_DRAFT_PROBS:
        drafts = draft_token_ids_ptr.long().unsqueeze(1)
        token = drafts.clamp_min(0)
        probs = target_probs_ptr.scatter(1, token, torch.where(drafts < 0, target_probs_ptr.gather(1, token), 0.0))
    else:
        probs = (target_probs_ptr - draft_probs_ptr).clamp_min(0)
    best = (probs * inv_q_ptr[_owners(cu_num_draft_tokens_ptr, numbers)]).argmax(1)
    output_token_ids_ptr.copy_(best)
