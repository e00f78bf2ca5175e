# SPDX-License-Identifier: BSD-3-Clause
"""AutoRound: GPTQ's or AWQ's tensors under a configuration of its own.

Format: https://github.com/intel/auto-round (export/export_to_autoround); extra_config changes the settings of modules,
named exactly or by a regular expression.
"""

import re
from typing import Any

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes import awq, gptq

READERS = {"auto_round:auto_gptq": gptq.matrices, "auto_round:auto_awq": awq.matrices}
"""packing_format to what reads its tensors."""

NOT_QUANTISED = 16
"""Bits, from here on, of a module in extra_config that is left as it was."""


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if packing not in READERS:
        raise ValueError(f"AutoRound packing_format {packing!r}: superl8 reads {', '.join(READERS)}")
    rules = {}
    for name, changes in (config.get("extra_config") or {}).items():
        pattern = f"{re.escape(name)}$" if re.fullmatch(r"[\w.-]+", name) else f".*(?:{name})"
        left_out = changes.get("bits", 0) >= NOT_QUANTISED
        rules[f"{'-' if left_out else '+'}:{pattern}"] = changes
    return READERS[packing]({**config, "dynamic": rules}, stored)
