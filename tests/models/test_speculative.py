# SPDX-License-Identifier: BSD-3-Clause
"""Speculative decoding through vLLM: the tokens are those of plain decoding, whatever drafts them."""

import pytest

import tiny
from engine import engine, greedy

METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny.write("llama", folder)
    return folder


def prompts():
    """One that repeats itself, so that n-grams are found, and two that do not."""
    return [tiny.tokens(12) * 4, tiny.tokens(50), tiny.tokens(7, seed=4)]


def sampled(llm):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(checkpoint):
    with engine(checkpoint, dtype="float32", skip_tokenizer_init=True) as llm:
        return greedy(llm, prompts(), max_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafting_changes_no_greedy_token(checkpoint, plain, method):
    speculative = dict(METHODS[method])
    if method == "draft_model":
        speculative["model"] = str(checkpoint)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": False}
    with engine(checkpoint, speculative_config=speculative, **options) as llm:
        assert greedy(llm, prompts(), max_tokens=24) == plain
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        drafted, accepted = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
        assert accepted > 0
        if method == "draft_model":  # the model itself: nothing to reject but what a request's end cuts off
            assert accepted > 0.8 * drafted
        first = sampled(llm)
        assert first == sampled(llm)  # seeded
        assert len({tuple(tokens) for tokens in first}) == 3
