# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on Volta and CMP cards: INT8 dot-product kernels, attention and quantisation as a plugin."""

__version__ = "0.1.0"
