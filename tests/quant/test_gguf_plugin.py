# SPDX-License-Identifier: BSD-3-Clause
"""vllm-gguf-plugin's names are had without Triton, which the plugin imports."""

import subprocess
import sys

SCRIPT = """
import sys

sys.modules["triton"] = None  # as if it were not installed
from vllm_superl8.quant.gguf import plugin

assert plugin.module("weights_adapter").get_weights_adapter
assert plugin.module("gguf_utils").is_gguf
assert sys.modules["triton"] is None, "something else would take the placeholder for Triton"
assert "triton.language" not in sys.modules
"""


def test_adapters_are_imported_without_triton():
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
