# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM's entry points call, and the one list of everything handed to vLLM.

Both functions run in every vLLM process, several times; they are idempotent and never initialise CUDA. Imports happen
inside them, because importing vLLM modules here would ask for the platform while it is being resolved.
"""

import logging

logger = logging.getLogger(__name__)


def platform() -> str | None:
    """Class path of the platform to use here, or None to leave the machine to stock vLLM."""
    from vllm_superl8 import compat, device, envs

    if problems := compat.problems():
        logger.error("superl8 is not active: %s", " ".join(problems))
        return None
    cards = device.cards()
    if not cards:
        return "vllm_superl8.platform.cpu.Superl8CpuPlatform"
    capabilities = {card.capability for card in cards}
    newer = min(capabilities) >= (7, 5)
    if newer and not envs.force_volta():
        return None
    if not newer and not any(capability in device.DP4A_CAPABILITIES for capability in capabilities):
        names = ", ".join(f"{card.name} (sm_{card.capability[0]}{card.capability[1]})" for card in cards)
        logger.error("superl8 is not active: %s has no dp4a; it needs sm_61, sm_70 or sm_72", names)
        return None
    import torch

    if not torch.backends.cuda.is_built():
        logger.warning(
            "superl8 uses the CPU although this machine has %s: torch %s is a CPU build. Install one with sm_70 code, "
            "for example torch==2.10.0 from PyPI.",
            cards[0].name,
            torch.__version__,
        )
        return "vllm_superl8.platform.cpu.Superl8CpuPlatform"
    return "vllm_superl8.platform.volta.VoltaPlatform"


def register() -> None:
    """Register everything with vLLM: backend, KV formats, quantisation, loaders, IR providers, patches.

    Raises RuntimeError when vLLM or torch is outside the supported range.
    """
    from vllm_superl8 import compat

    if problems := compat.problems():
        raise RuntimeError(" ".join(problems))

    _log_as_vllm_does()

    from vllm_superl8 import ops  # noqa: F401  (defines torch.ops.superl8)
    from vllm_superl8.attention import kv_cache
    from vllm_superl8.attention import register as register_attention
    from vllm_superl8.platform import custom_ops
    from vllm_superl8.quant import register as register_quantization

    kv_cache.register()
    register_attention()
    register_quantization()
    custom_ops.register()


def _log_as_vllm_does() -> None:
    """Hang our loggers under vLLM's, which it may yet configure; it gives handlers and a level to its own only."""
    logging.getLogger("vllm_superl8").parent = logging.getLogger("vllm")
