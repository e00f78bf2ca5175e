# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 doctor``: what works here, what is slow, what to install. Exits 1 when serving cannot work."""

import argparse
import json
import logging
from dataclasses import asdict, dataclass, field

from vllm_superl8 import __version__, device
from vllm_superl8.tools.checks import Finding, card, rates, software

TARGETS = {
    "cuda": "on the GPU",
    "cpu": "on the CPU, by torch code that is made to be right rather than fast",
    "stock": "by stock vLLM: superl8 leaves this GPU alone (SUPERL8_FORCE_VOLTA=1 runs the Volta path on it)",
    "none": "nowhere",
}
"""Who would serve here."""


@dataclass
class Report:
    """Everything that the doctor found.

    target  a key of TARGETS
    rates   dp4a_tops, fp16_tflops, hbm_gbps as far as measured
    """

    target: str
    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def serving(self) -> bool:
        """Whether models can be served."""
        return self.target != "none" and all(finding.level != "broken" for finding in self.findings)


def examine() -> Report:
    """Look at everything. What needs torch or vLLM is left out where they are missing or do not fit."""
    report = Report("none", [*software.versions(), *card.cards()])
    if any(finding.topic == "versions" and finding.level == "broken" for finding in report.findings):
        return report
    report.target = _target()
    if report.target == "none":
        return report
    if device.cards():
        report.findings += [*card.driver(), *card.links(), *card.torch_code()]
    report.findings += software.vllm_build(report.target)
    if report.target == "stock":
        return report
    for check in (software.extension, software.triton, software.compiler):
        report.findings += check(report.target)
    report.findings += software.platform_class()
    if report.target == "cpu" or report.serving:  # a GPU that torch has no code for is not tried
        report.findings += card.arithmetic(report.target)
    if report.target == "cuda" and report.serving:
        report.rates, findings = rates.measure()
        report.findings += findings
    return report


def _target() -> str:
    """Who would serve, by the decision that vLLM itself gets from the plugin."""
    from vllm_superl8 import plugin

    level = plugin.logger.level
    plugin.logger.setLevel(logging.CRITICAL)  # the findings say the same
    try:
        path = plugin.platform()
    finally:
        plugin.logger.setLevel(level)
    if path is None:
        newer = any(found.capability >= (7, 5) for found in device.cards())
        return "stock" if newer else "none"
    return "cpu" if path.startswith("vllm_superl8.platform.cpu.") else "cuda"


def as_dict(report: Report) -> dict:
    """The report as --json prints it."""
    return {
        "version": __version__,
        "serving": report.serving,
        "target": report.target,
        "rates": report.rates,
        "findings": [asdict(finding) for finding in report.findings],
    }


def render(report: Report) -> str:
    """The report in plain words."""
    lines = [f"superl8 {__version__}"]
    for finding in report.findings:
        lines.append(f"  {finding.level:<8}{finding.topic:<11}{finding.text}")
        if finding.advice:
            lines.append(f"  {'':<19}-> {finding.advice}")
    lines.append(
        f"Models can be served {TARGETS[report.target]}." if report.serving else "Models cannot be served here."
    )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    report = examine()
    print(json.dumps(as_dict(report), indent=2) if args.json else render(report))
    return 0 if report.serving else 1
