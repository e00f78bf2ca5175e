# SPDX-License-Identifier: BSD-3-Clause
"""The server answers the official OpenAI client: one request, a stream, many at once, one given up."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from openai import OpenAI

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PREFIX = "You answer in one short sentence. " * 12
NAMES = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Cuba", "Chile"]


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=server[0], api_key="none", timeout=300)


def chat(client, model, messages=QUESTION, max_tokens=32):
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=max_tokens)
    return reply.choices[0].message.content


def test_server_lists_the_model_as_the_user_named_it(client, server):
    assert server[1] in [model.id for model in client.models.list()]


def test_chat_answers(client, server):
    assert chat(client, server[1]) == ANSWER


def test_stream_gives_the_same_answer_in_pieces(client, server):
    stream = client.chat.completions.create(
        model=server[1], messages=QUESTION, temperature=0, max_tokens=32, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == ANSWER
    assert len([piece for piece in pieces if piece]) > 3


def test_sixteen_requests_at_once_are_answered_as_one_at_a_time(client, server):
    """Shared prefix, prefix caching, chunked prefill. On a GPU the order of float sums follows the batch, and decides
    between two nearly equal tokens now and then."""
    questions = [
        [{"role": "user", "content": f"{PREFIX} {ask} {name}?"}]
        for ask in ("What is the capital of", "Which continent holds")
        for name in NAMES
    ]
    alone = [chat(client, server[1], question, 12) for question in questions]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda question: chat(client, server[1], question, 12), questions))
    equal = sum(a == b for a, b in zip(alone, together, strict=True))
    assert equal >= (13 if torch.cuda.is_available() else 16)
    assert len(set(alone)) > 8, "the questions must not all have one answer"


def test_abort_in_mid_stream_leaves_the_server_healthy(client, server):
    stream = client.chat.completions.create(
        model=server[1], messages=[{"role": "user", "content": "Tell me a long story."}], max_tokens=1500, stream=True
    )
    for count, _ in enumerate(stream):
        if count == 3:
            stream.close()
            break
    assert chat(client, server[1]) == ANSWER


def test_sampling_with_a_seed_repeats(client, server):
    ask = lambda: client.chat.completions.create(  # noqa: E731
        model=server[1], messages=QUESTION, temperature=0.9, top_p=0.9, seed=11, max_tokens=16, presence_penalty=0.5
    )
    assert ask().choices[0].message.content == ask().choices[0].message.content
