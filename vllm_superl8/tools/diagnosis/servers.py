# SPDX-License-Identifier: BSD-3-Clause
"""Two OpenAI-compatible servers compared by the log-probabilities that they give: vLLM's, llama.cpp's or others.

Only what /v1/completions of both returns is used: the most likely next tokens after a text, by their text.
"""

import json
import math
import statistics
import urllib.error
import urllib.request

CHARACTERS = 2000
"""Of text before each place that is asked about."""

SECONDS = 300


def compare(reference: str, other: str, text: str, prompts: int = 64, top: int = 20) -> dict:
    """How far `other` is from `reference`, both base URLs that end in /v1.

    prompts  places of the text where the next token is asked for, spread evenly
    top      log-probabilities to ask for; vLLM gives 20 unless it was started with --max-logprobs

    returns  prompts, kld_mean, kld_median, kld_p95, kld_max (nats), top1, and for each server its model and name.
             KLD is over the tokens that the reference lists, the rest as one more outcome; a token that the other does
             not list counts with the least that it lists, so that the number is a lower bound
    Raises ValueError, naming the server, where one cannot be asked or does not give log-probabilities.
    """
    if prompts < 1 or len(text) < 2 * prompts:
        raise ValueError(f"the text has {len(text)} characters, too few for {prompts} prompts")
    servers = [(url.rstrip("/"), _model(url.rstrip("/"))) for url in (reference, other)]
    klds, same = [], []
    for prefix in prefixes(text, prompts):
        want, got = (_next(url, model, prefix, top) for url, model in servers)
        klds.append(divergence(want, got))
        same.append(max(want, key=want.get) == max(got, key=got.get))
    ordered = sorted(klds)
    return {
        "prompts": len(klds),
        "kld_mean": statistics.fmean(klds),
        "kld_median": statistics.median(klds),
        "kld_p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "kld_max": ordered[-1],
        "top1": statistics.fmean(same),
        "reference": {"url": servers[0][0], "model": servers[0][1]},
        "other": {"url": servers[1][0], "model": servers[1][1]},
    }


def summary(found: dict) -> str:
    """The comparison in a few lines."""
    return "\n".join(
        [
            f"reference  {found['reference']['model']} at {found['reference']['url']}",
            f"other      {found['other']['model']} at {found['other']['url']}",
            f"{found['prompts']} places: KLD mean {found['kld_mean']:.2e}, median {found['kld_median']:.2e}, "
            f"p95 {found['kld_p95']:.2e}, max {found['kld_max']:.2e} (at least); same first choice {found['top1']:.2%}",
        ]
    )


def prefixes(text: str, count: int) -> list[str]:
    """`count` pieces of up to CHARACTERS that end before a space, spread over the text."""
    found = []
    for number in range(1, count + 1):
        end = text.rfind(" ", 0, number * len(text) // count)
        if end > 0:
            found.append(text[max(0, end - CHARACTERS) : end])
    return found


def divergence(want: dict[str, float], got: dict[str, float]) -> float:
    """KLD in nats from log-probabilities of the most likely tokens."""
    least = min(got.values())
    total = rest = got_rest = 0.0
    for token, logprob in want.items():
        p = math.exp(logprob)
        other = got.get(token, least)
        total += p * (logprob - other)
        rest += p
        got_rest += math.exp(other)
    p, q = max(0.0, 1 - rest), max(1e-12, 1 - got_rest)
    return max(0.0, total + (p * math.log(p / q) if p > 1e-9 else 0.0))


def _model(url: str) -> str:
    try:
        return _ask(f"{url}/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url}/models lists no model") from error


def _next(url: str, model: str, prompt: str, top: int) -> dict[str, float]:
    """Text of the most likely next tokens to their log-probabilities."""
    request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": top}
    answer = _ask(f"{url}/completions", request)
    try:
        found = answer["choices"][0]["logprobs"]
        if found.get("top_logprobs"):  # OpenAI's and vLLM's form
            entries = found["top_logprobs"][0].items()
        else:  # llama.cpp's, as in chat completions
            entries = [(entry["token"], entry["logprob"]) for entry in found["content"][0]["top_logprobs"]]
        chosen = {token: float(logprob) for token, logprob in entries}
        if not chosen or not all(math.isfinite(logprob) for logprob in chosen.values()):
            raise ValueError("none, or not finite")
        return chosen
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{url}/completions gave no log-probabilities: {json.dumps(answer)[:200]}") from error


def _ask(url: str, content: dict | None = None):
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ValueError(f"{url} cannot be asked: {error}") from error
