# SPDX-License-Identifier: BSD-3-Clause
"""What ``superl8 doctor`` looks at. A check returns findings and never raises for what it finds."""

from dataclasses import dataclass

LEVELS = {
    "ok": "works",
    "slow": "works, but slower or with less than there could be",
    "missing": "optional, and absent",
    "broken": "serving cannot work",
}


@dataclass(frozen=True)
class Finding:
    """One sentence about one topic.

    level   a key of LEVELS
    advice  what to install or change, empty if nothing
    """

    topic: str
    level: str
    text: str
    advice: str = ""

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"Finding: level {self.level!r}; choose one of {', '.join(LEVELS)}")
