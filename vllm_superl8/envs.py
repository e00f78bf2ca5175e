# SPDX-License-Identifier: BSD-3-Clause
"""Every environment variable that the package reads, with its default and effect.

All of them are for debugging or comparison; what a user needs is an option of vLLM or of ``superl8``.
The build has its own (``SUPERL8_ARCHS``, ``SUPERL8_PURE_PYTHON``, ``SUPERL8_BUILD_CACHE``): see csrc/build.py.
"""

import os


def force_volta() -> bool:
    """SUPERL8_FORCE_VOLTA=1: take over a GPU newer than sm_70 and report it as (7, 0). Default off.

    For developing and measuring the Volta path on a newer card; goes when nobody develops that way.
    """
    return os.environ.get("SUPERL8_FORCE_VOLTA", "0") == "1"


def disable_kernels() -> bool:
    """SUPERL8_DISABLE_KERNELS=1: run every op's torch reference even where a CUDA kernel exists. Default off.

    For telling a kernel bug from a model bug.
    """
    return os.environ.get("SUPERL8_DISABLE_KERNELS", "0") == "1"
