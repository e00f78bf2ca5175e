# SPDX-License-Identifier: BSD-3-Clause
"""Cards, driver, PCIe link, torch's code for the card, and whether a kernel gives the right numbers."""

import re
from pathlib import Path

from vllm_superl8 import device
from vllm_superl8.tools.checks import Finding

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
PCIE_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""Payload of one lane in 10^9 bytes a second, by PCIe generation."""
SLOW_LINK_GBPS = 4.0
OLDEST_CUDA_DRIVER = (12, 0)


def cards() -> list[Finding]:
    """The visible cards and what superl8 makes of them."""
    found = device.cards()
    if not found:
        return [_no_card()]
    return [_card(card) for card in found]


def _card(card: device.Card) -> Finding:
    major, minor = card.capability
    text = f"GPU {card.index}: {card.name}, sm_{major}{minor}, {card.memory_bytes / 2**30:.0f} GiB"
    if card.capability in device.DP4A_CAPABILITIES:
        return Finding("card", "ok", text)
    if card.capability >= (7, 5):
        return Finding("card", "ok", f"{text}, newer than the cards that superl8 is made for")
    return Finding("card", "broken", f"{text}, which has no dp4a", "superl8 needs sm_61, sm_70 or sm_72")


def _no_card() -> Finding:
    hidden = nvidia_on_the_bus()
    if not hidden:
        return Finding("card", "ok", "no NVIDIA GPU: models are served on the CPU")
    return Finding(
        "card",
        "slow",
        f"an NVIDIA GPU is on the PCI bus ({', '.join(hidden)}) but no driver shows it: models are served on the CPU",
        "install NVIDIA's driver of branch 580, the last for Volta and Pascal, or look at CUDA_VISIBLE_DEVICES",
    )


def nvidia_on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """PCI addresses of NVIDIA's display and compute devices, whether or not a driver is loaded."""
    found = []
    for folder in sorted(devices.glob("*")):
        try:
            vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind[:6] in DISPLAY_CLASSES:
            found.append(folder.name)
    return found


def driver() -> list[Finding]:
    """Version of the driver and of the CUDA that it speaks, against torch's."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    finally:
        pynvml.nvmlShutdown()
    speaks = (number // 1000, number % 1000 // 10)
    text = f"driver {version if isinstance(version, str) else version.decode()}, CUDA {speaks[0]}.{speaks[1]}"
    wanted = torch.version.cuda
    if speaks < OLDEST_CUDA_DRIVER:
        return [
            Finding("driver", "broken", f"{text}, older than our kernels' CUDA 12", "install a driver of branch 580")
        ]
    if wanted and int(wanted.split(".")[0]) > speaks[0]:
        text += f", older than torch's CUDA {wanted}"
        return [Finding("driver", "broken", text, "install a newer driver, or torch==2.10.0 (CUDA 12.8)")]
    return [Finding("driver", "ok", text)]


def links() -> list[Finding]:
    """The PCIe link of each visible card, at the best that card and slot agree on."""
    import pynvml

    findings = []
    pynvml.nvmlInit()
    try:
        for card in device.cards():
            handle = pynvml.nvmlDeviceGetHandleByIndex(card.index)
            try:
                generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
                width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
            except pynvml.NVMLError as error:
                findings.append(Finding("pcie", "ok", f"GPU {card.index}: the driver does not tell ({error})"))
                continue
            findings.append(link(card.index, generation, width))
    finally:
        pynvml.nvmlShutdown()
    return findings


def link(index: int, generation: int, width: int) -> Finding:
    """What a PCIe link of this generation and width means for serving."""
    lane_gbps = PCIE_LANE_GBPS.get(generation, max(PCIE_LANE_GBPS.values()))
    gbps = lane_gbps * width
    text = f"GPU {index}: PCIe {generation} x{width}, {gbps:.2g} GB/s"
    if gbps >= SLOW_LINK_GBPS:
        return Finding("pcie", "ok", text)
    return Finding(
        "pcie",
        "slow",
        f"{text}: a 7 GB model takes {7 / gbps:.0f} s to load; generation on one card is not slowed",
        "on several cards use --pipeline-parallel-size rather than --tensor-parallel-size; avoid CPU offload",
    )


def torch_code() -> list[Finding]:
    """Whether torch is a CUDA build and holds code for every visible card."""
    import torch

    if not torch.backends.cuda.is_built():
        return [
            Finding(
                "torch",
                "slow",
                f"torch {torch.__version__} is a CPU build: the GPU is not used",
                "pip install torch==2.10.0 (CUDA 12.8, has sm_70), or run bootstrap.sh again",
            )
        ]
    archs = torch.cuda.get_arch_list()
    if not archs:
        return [Finding("torch", "broken", f"torch {torch.__version__} cannot use CUDA here", "look at the driver")]
    text = f"torch {torch.__version__} with code for {' '.join(archs)}"
    for card in device.cards():
        if not has_code_for(card.capability, archs):
            major, minor = card.capability
            text += f", none for GPU {card.index} (sm_{major}{minor})"
            wanted = "torch==2.10.0" if card.capability >= (7, 0) else "a cu126 build of torch from PyTorch's index"
            return [Finding("torch", "broken", text, f"install {wanted}")]
    return [Finding("torch", "ok", text)]


def has_code_for(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether a list such as ["sm_70", "sm_90a", "compute_90"] holds code that runs on a card.

    Machine code runs on its own major version from its minor version on; PTX on its own version and every later one.
    """
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind, version, special = match[1], (int(match[2]), int(match[3])), match[4]
        if version == capability:
            return True
        if special or version > capability:
            continue
        if kind == "compute" or version[0] == capability[0]:
            return True
    return False


def arithmetic(target: str) -> list[Finding]:
    """Quantise and multiply a small matrix as serving does, and compare with plain arithmetic."""
    import torch

    from vllm_superl8.ops import quantize_int8, w8a8_gemm

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator) for rows in (4, 64))
    place = "the GPU" if target == "cuda" else "the CPU"
    try:
        on = "cuda" if target == "cuda" else "cpu"
        codes, scales = quantize_int8(x.half().to(on))
        weight_codes, weight_scales = quantize_int8(weight.half().to(on))
        product = w8a8_gemm(codes, scales, weight_codes, weight_scales, None, torch.float32).cpu()
    except Exception as error:  # the failure is the finding
        return [Finding("arithmetic", "broken", f"W8A8 does not run on {place}: {type(error).__name__}: {error}")]
    exact = x @ weight.T
    error = ((product - exact).norm() / exact.norm()).item()
    if not error < 0.02:
        return [Finding("arithmetic", "broken", f"W8A8 on {place} is wrong: relative error {error:.2g}")]
    return [Finding("arithmetic", "ok", f"W8A8 product on {place}: relative error {error:.1%}, as int8 gives")]
