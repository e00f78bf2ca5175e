# SPDX-License-Identifier: BSD-3-Clause
"""How far one model is from another: signal to noise, Kullback-Leibler divergence, equal first choices."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """10 log10(sum want^2 / sum (got - want)^2): inf where they are equal, NaN where one is not finite.

    Raises ValueError for different shapes.
    """
    if got.shape != want.shape:
        raise ValueError(f"sqnr_db: shapes {tuple(got.shape)} and {tuple(want.shape)} differ")
    want = want.double()
    signal = want.square().sum().item()
    noise = (got.double() - want).square().sum().item()
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or not math.isfinite(signal):
        return math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass(frozen=True)
class Distance:
    """Of next-token distributions over the same tokens, `got` from `want`.

    kld_*        Kullback-Leibler divergence sum want log(want / got) a token, in nats
    top1         share of tokens whose most likely next token is the same
    logits_db    SQNR of the logits, each row less its mean (a softmax does not see the mean)
    perplexity   exp of the mean negative log-likelihood of the text under `got`; reference_perplexity under `want`
    """

    tokens: int
    kld_mean: float
    kld_median: float
    kld_p95: float
    kld_p99: float
    kld_max: float
    top1: float
    logits_db: float
    perplexity: float
    reference_perplexity: float


def distance(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], targets: torch.Tensor) -> Distance:
    """Distance over consecutive chunks of logits (got, want), each (tokens, vocab).

    targets  (tokens) the token that follows each; where there are fewer targets than rows, the rest has none
    """
    klds, same, got_nll, want_nll = [], [], [], []
    signal = noise = 0.0
    at = 0
    for got, want in pairs:
        got, want = got.double(), want.double()
        kld, p, q = divergence(got, want)
        klds.append(kld)
        same.append(got.argmax(-1) == want.argmax(-1))
        finite = (want != -math.inf) & (got != -math.inf)  # padding of the vocabulary
        counts = finite.sum(-1, keepdim=True)
        centred = [(x - x.where(finite, 0).sum(-1, keepdim=True) / counts).where(finite, 0) for x in (got, want)]
        signal += centred[1].square().sum().item()
        noise += (centred[0] - centred[1]).square().sum().item()
        here = targets[at : at + len(got)].to(got.device)
        at += len(got)
        for logs, losses in ((q, got_nll), (p, want_nll)):
            losses.append(-logs[: len(here)].gather(1, here[:, None]).squeeze(1))
    kld = torch.cat(klds).cpu()
    quantiles = torch.quantile(kld, torch.tensor([0.5, 0.95, 0.99], dtype=kld.dtype))
    return Distance(
        tokens=len(kld),
        kld_mean=kld.mean().item(),
        kld_median=quantiles[0].item(),
        kld_p95=quantiles[1].item(),
        kld_p99=quantiles[2].item(),
        kld_max=kld.max().item(),
        top1=torch.cat(same).double().mean().item(),
        logits_db=math.inf if noise == 0 else 10 * math.log10(signal / noise) if noise == noise else math.nan,
        perplexity=math.exp(torch.cat(got_nll).mean().item()),
        reference_perplexity=math.exp(torch.cat(want_nll).mean().item()),
    )


def divergence(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(divergence a row, log-probabilities of want, of got) of logits (rows, vocab)."""
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    terms = torch.where(p.exp() > 0, p.exp() * (p - q), torch.zeros_like(p))
    return terms.sum(-1), p, q
