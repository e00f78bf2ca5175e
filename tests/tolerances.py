# SPDX-License-Identifier: BSD-3-Clause
"""Every limit of the tests, with what was measured when it was set. Tests write ``assert error < limit``.

Three questions are kept apart: bytes (compared for equality: no limits), arithmetic, quality. ``faults.py`` proves that
the limits reject what is wrong.
"""

from dataclasses import dataclass

import torch

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Limit:
    """An error has to be below `limit`; `measured` is the largest that was seen, `where` on what."""

    limit: float
    measured: float
    where: str = "emulator"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest |got - want|, each as a share of the largest |want| in its row (last dimension); NaN if got has one.

    Raises AssertionError if shapes differ, or if a row of `want` is zero or not finite and so would prove nothing.
    """
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    got, want = got.double().cpu(), want.double().cpu()
    if want.numel() == 0:
        return 0.0
    size = want.abs().amax(-1, keepdim=True)
    assert torch.isfinite(size).all() and (size > 0).all(), "the reference has a row that is zero or not finite"
    return ((got - want).abs() / size).max().item()


# Arithmetic: kernel against its reference computed from the same inputs without rounding the result to 16 bits.
# Rounding alone is up to 2^-11 = 4.9e-4 of a row's largest element in fp16 and 2^-8 = 3.9e-3 in bf16.
# ARITHMETIC[op][dtype of the result]
ARITHMETIC: dict[str, dict[str, Limit]] = {
    "w8a8_gemm": {"fp16": Limit(6e-4, 4.7e-4), "bf16": Limit(4.5e-3, 3.7e-3), "fp32": Limit(1.5e-6, 5e-7)},
    "block_gemm": {"fp16": Limit(6e-4, 4.8e-4), "bf16": Limit(4.5e-3, 3.8e-3), "fp32": Limit(1.5e-6, 4.1e-7)},
    "moe_sum": {"fp16": Limit(6e-4, 4.1e-4), "bf16": Limit(4.5e-3, 2.8e-3), "fp32": Limit(8e-7, 8e-8)},
    "rms_norm": {"fp16": Limit(6e-4, 4.9e-4), "bf16": Limit(4.5e-3, 3.9e-3), "fp32": Limit(2e-6, 4e-7)},
    "rotary_embedding": {"fp16": Limit(6e-4, 4.4e-4), "bf16": Limit(4.5e-3, 3.6e-3), "fp32": Limit(1e-6, 9.5e-8)},
    "act_and_mul": {"fp16": Limit(6e-4, 4.2e-4), "bf16": Limit(4.5e-3, 3.4e-3), "fp32": Limit(1e-6, 2.1e-7)},
    "act": {"fp16": Limit(6e-4, 3.2e-4), "bf16": Limit(4.5e-3, 2.7e-3), "fp32": Limit(1e-6, 9.4e-8)},
    "apply_repetition_penalties": {
        "fp16": Limit(6e-4, 3.2e-4),
        "bf16": Limit(4.5e-3, 2.6e-3),
        "fp32": Limit(1e-6, 1e-7),
    },
    "topk_routing": {"fp32": Limit(1e-6, 2.5e-7)},
    "paged_attention": {"fp16": Limit(6e-4, 4.9e-4), "bf16": Limit(4.5e-3, 3.8e-3), "fp32": Limit(5e-6, 1.3e-6)},
    "merge_attn_states": {"fp16": Limit(6e-4, 3.9e-4), "bf16": Limit(4.5e-3, 3.3e-3), "fp32": Limit(4e-6, 1.1e-6)},
}


def arithmetic_limit(op: str, dtype: torch.dtype) -> float:
    """The limit for relative_error of an op's result in this dtype."""
    return ARITHMETIC[op][NAMES[dtype]].limit


@dataclass(frozen=True)
class Quality:
    """What rounding to a format costs against unrounded values (in place of a Limit: the bars are the project's).

    cosine      of got and want, at least
    rel_l1      sum |got - want| / sum |want|, at most
    sqnr_db     10 log10(sum want^2 / sum (got - want)^2), at least
    """

    cosine: float
    rel_l1: float
    sqnr_db: float

    @staticmethod
    def of(got: torch.Tensor, want: torch.Tensor) -> "Quality":
        got, want = got.double().cpu().flatten(), want.double().cpu().flatten()
        error = got - want
        return Quality(
            cosine=(got @ want / (got.norm() * want.norm())).item(),
            rel_l1=(error.abs().sum() / want.abs().sum()).item(),
            sqnr_db=20 * torch.log10(want.norm() / error.norm()).item(),
        )

    def meets(self, bar: "Quality") -> bool:
        """Whether all three are within the bar; False if one is NaN."""
        return self.cosine > bar.cosine and self.rel_l1 < bar.rel_l1 and self.sqnr_db > bar.sqnr_db


# QUALITY[op]. int8 attention, a quantised query over quantised K and V, against the unquantised query over the same
# cache; measured in the emulator with outlier channels and means in K: cosine 0.99998, rel-L1 0.0054, 44 dB.
QUALITY = {"paged_attention": Quality(cosine=0.999, rel_l1=0.02, sqnr_db=20.0)}
