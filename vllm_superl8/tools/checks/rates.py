# SPDX-License-Identifier: BSD-3-Clause
"""What the current card does in practice: dp4a, fp16 tensor cores, memory. About a second in all."""

from vllm_superl8.tools.checks import Finding

THROTTLED_RATIO = 0.5
"""fp16 matrix rate over dp4a rate: 1.5 to 1.8 on a V100 (about 100 TFLOPS over 63 TOPS), 0.13 on a CMP 100-210."""

NEEDED_BYTES = 1 << 29
"""Free memory below which rates are not measured: something else is using the card."""


def measure() -> tuple[dict[str, float], list[Finding]]:
    """The rates that could be measured (dp4a_tops, fp16_tflops, hbm_gbps), and what they mean."""
    import torch

    from vllm_superl8.ops import registry
    from vllm_superl8.tools import measure as timing

    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < NEEDED_BYTES:
        text = f"not measured: {free_bytes / 2**20:.0f} MiB of GPU memory are free"
        return {}, [Finding("rates", "ok", text, "stop what is using the card and run the doctor again")]
    probes = {"fp16_tflops": timing.fp16_tflops}
    if registry.COMPILED is not None:
        probes |= {"dp4a_tops": timing.dp4a_tops, "hbm_gbps": timing.hbm_gbps}
    rates, findings = {}, []
    for name, probe in probes.items():
        try:
            rates[name] = probe()
        except Exception as error:  # a failing probe is a finding, the others still count
            findings.append(Finding("rates", "broken", f"{name} cannot be measured: {type(error).__name__}: {error}"))
    return rates, [*findings, *explain(rates)]


def explain(rates: dict[str, float]) -> list[Finding]:
    """The rates in words."""
    findings = []
    dp4a, fp16, memory = (rates.get(name) for name in ("dp4a_tops", "fp16_tflops", "hbm_gbps"))
    if dp4a is not None and memory is not None:
        text = f"dp4a {dp4a:.1f} TOPS, memory {memory:.0f} GB/s: at most {memory / 7:.0f} tokens/s from 7 GB of weights"
        findings.append(Finding("rates", "ok", text))
    if fp16 is None:
        return findings
    text = f"fp16 matrix products {fp16:.1f} TFLOPS"
    if dp4a is not None and fp16 < THROTTLED_RATIO * dp4a:
        text += ": the tensor cores are absent or throttled, so 16-bit models read prompts slowly"
        findings.append(Finding("rates", "slow", text, "serve with --quantization superl8, which uses dp4a"))
    else:
        findings.append(Finding("rates", "ok", text))
    return findings
