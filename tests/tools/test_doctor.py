# SPDX-License-Identifier: BSD-3-Clause
"""doctor: a true report of this machine, and the right words for machines that are not at hand."""

import json
import os
import subprocess
import sys

import pytest
import torch

from vllm_superl8 import device
from vllm_superl8.tools import doctor
from vllm_superl8.tools.checks import LEVELS, Finding, card, rates, software


def run_doctor(**environment: str) -> subprocess.CompletedProcess:

    command = [sys.executable, "-m", "vllm_superl8.tools.cli", "doctor", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def report():
    if device.cards():
        pytest.skip("there is a GPU; the test describes a machine without one")
    result = run_doctor()
    return result.returncode, json.loads(result.stdout)


def topics(report) -> dict[str, dict]:
    return {finding["topic"]: finding for finding in report["findings"]}


def test_doctor_says_that_the_cpu_serves(report):
    code, content = report
    assert (code, content["serving"], content["target"]) == (0, True, "cpu")
    assert not [finding for finding in content["findings"] if finding["level"] == "broken"]


def test_doctor_looks_at_everything_on_a_cpu(report):
    found = topics(report[1])
    assert set(found) == {"versions", "card", "vllm", "kernels", "triton", "compiler", "platform", "arithmetic"}
    assert torch.__version__ in found["versions"]["text"]
    assert "Superl8CpuPlatform" in found["platform"]["text"]
    assert report[1]["rates"] == {}


def test_doctor_fails_when_vllm_leaves_the_plugin_out():
    result = run_doctor(VLLM_PLUGINS="gguf")
    assert result.returncode == 1
    content = json.loads(result.stdout)
    assert content["serving"] is False
    assert topics(content)["platform"]["level"] == "broken"
    assert topics(content)["platform"]["advice"] == "unset it, or VLLM_PLUGINS=gguf,superl8"


@pytest.mark.gpu
def test_doctor_measures_the_gpu():
    result = run_doctor(SUPERL8_FORCE_VOLTA="1")
    content = json.loads(result.stdout)
    assert result.returncode == 0, content
    assert content["target"] == "cuda"
    assert set(content["rates"]) == {"dp4a_tops", "fp16_tflops", "hbm_gbps"}
    assert all(rate > 1 for rate in content["rates"].values())


def test_one_broken_finding_means_no_serving():
    findings = [Finding("a", level, "text") for level in LEVELS if level != "broken"]
    assert doctor.Report("cuda", findings).serving
    assert not doctor.Report("cuda", [*findings, Finding("b", "broken", "text")]).serving
    assert not doctor.Report("none", findings).serving


def test_render_shows_every_finding_and_advice():
    report = doctor.Report("cuda", [Finding("pcie", "slow", "x1", "do this"), Finding("card", "ok", "V100")])
    text = doctor.render(report)
    assert [word for word in ("slow", "pcie", "x1", "-> do this", "card", "V100") if word not in text] == []
    assert text.endswith("Models can be served on the GPU.")


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((7, 0), ["sm_70", "sm_75"], True),
        ((7, 0), ["sm_75", "sm_80", "compute_90"], False),
        ((7, 5), ["sm_70"], True),
        ((8, 0), ["sm_70"], False),
        ((9, 0), ["sm_70", "compute_70"], True),
        ((6, 1), ["sm_60", "sm_70"], True),
        ((6, 1), ["sm_70", "compute_70"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120"], True),
        ((10, 3), ["sm_100a"], False),
        ((7, 0), [], False),
    ],
)
def test_has_code_for_follows_cudas_rules(capability, archs, expected):
    assert card.has_code_for(capability, archs) is expected


@pytest.mark.parametrize(
    ("generation", "width", "level"), [(3, 16, "ok"), (1, 1, "slow"), (2, 4, "slow"), (4, 8, "ok")]
)
def test_link_tells_slow_ones(generation, width, level):
    assert card.link(0, generation, width).level == level


def test_link_of_a_mining_card_says_how_long_loading_takes():
    finding = card.link(0, 1, 1)
    assert "PCIe 1 x1, 0.25 GB/s" in finding.text
    assert "28 s to load" in finding.text
    assert "--pipeline-parallel-size" in finding.advice


def test_rates_name_throttled_tensor_cores():
    levels = {finding.text: finding for finding in rates.explain({"dp4a_tops": 47, "hbm_gbps": 800, "fp16_tflops": 6})}
    slow = [finding for finding in levels.values() if finding.level == "slow"]
    assert len(slow) == 1
    assert "throttled" in slow[0].text
    assert "--quantization superl8" in slow[0].advice


def test_rates_of_a_v100_are_fine():
    findings = rates.explain({"dp4a_tops": 63, "hbm_gbps": 900, "fp16_tflops": 100})
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert "at most 129 tokens/s" in findings[0].text


def pci_device(root, address, vendor, kind):
    folder = root / address
    folder.mkdir()
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_card_without_a_driver_is_seen_on_the_bus(tmp_path):
    pci_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    pci_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its audio function
    pci_device(tmp_path, "0000:02:00.0", "0x1234", "0x030000")
    assert card.nvidia_on_the_bus(tmp_path) == ["0000:01:00.0"]


def test_card_without_a_driver_gets_advice(monkeypatch):
    monkeypatch.setattr(card, "nvidia_on_the_bus", lambda: ["0000:01:00.0"])
    monkeypatch.setattr(device, "cards", lambda: ())
    (finding,) = card.cards()
    assert finding.level == "slow"
    assert "branch 580" in finding.advice


@pytest.mark.parametrize(
    ("capability", "level"), [((7, 0), "ok"), ((6, 1), "ok"), ((9, 0), "ok"), ((6, 0), "broken"), ((5, 2), "broken")]
)
def test_card_without_dp4a_is_refused(monkeypatch, capability, level):
    monkeypatch.setattr(device, "cards", lambda: (device.Card(0, "A card", capability, 16 << 30),))
    assert [finding.level for finding in card.cards()] == [level]


def test_missing_kernels_are_slow_on_a_gpu_and_fine_on_a_cpu(monkeypatch):
    from vllm_superl8.ops import registry

    monkeypatch.setattr(registry, "COMPILED", None)
    monkeypatch.setattr(registry, "NO_KERNELS_REASON", "for this test")
    (on_gpu,), (on_cpu,) = software.extension("cuda"), software.extension("cpu")
    assert (on_gpu.level, on_cpu.level) == ("slow", "ok")
    assert "for this test" in on_gpu.text
    assert "pip install" in on_gpu.advice


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    (finding,) = software.compiler("cuda")
    assert finding.level == "missing"
    assert finding.advice == "apt-get install g++"


def test_wrong_arithmetic_is_broken(monkeypatch):
    from vllm_superl8 import ops

    monkeypatch.setattr(ops, "w8a8_gemm", lambda x, *_: torch.zeros(x.shape[0], 64))
    (finding,) = card.arithmetic("cpu")
    assert finding.level == "broken"
    assert "wrong" in finding.text
