# SPDX-License-Identifier: BSD-3-Clause
"""bootstrap.sh plans what docs/INSTALL.md says, and refuses what it cannot do. Nothing is installed here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_superl8 import compat

ROOT = Path(__file__).resolve().parents[2]


def bootstrap(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "bootstrap.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def plan(*arguments: str, **environment: str) -> dict[str, str]:
    """The lines of the plan: topic to text."""
    result = bootstrap("--dry-run", "--python", sys.executable, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return dict(re.findall(r"^ {3}(\w+) +(.*)$", result.stdout, re.MULTILINE))


@pytest.fixture
def path_with_gpus(tmp_path):
    """Function from compute capabilities to a PATH with an nvidia-smi that reports them."""

    def make(*capabilities: str) -> str:
        tool = tmp_path / "nvidia-smi"
        lines = "".join(f"echo {capability}\n" for capability in capabilities)
        tool.write_text(f"#!/bin/sh\n{lines}")
        tool.chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    return make


def test_help_names_every_option():
    result = bootstrap("--help")
    assert result.returncode == 0
    script = (ROOT / "bootstrap.sh").read_text()
    options = set(re.findall(r"^ +(--[a-z-]+)\)", script, re.MULTILINE))
    assert len(options) > 5
    assert all(option in result.stdout for option in options)


@pytest.mark.parametrize(
    ("capabilities", "torch", "source"),
    [
        (["7.0"], "2.10.0", None),
        (["9.0", "7.0"], "2.10.0", None),
        (["6.1"], "2.14.0+cu126", "https://download.pytorch.org/whl/cu126"),
        (["9.0"], "2.14.0", None),
        (["12.0", "8.6"], "2.14.0", None),
    ],
)
def test_torch_follows_the_oldest_gpu(path_with_gpus, capabilities, torch, source):
    line = plan(PATH=path_with_gpus(*capabilities))["torch"]
    assert line.split()[0] == torch
    assert line.endswith(f"from {source}") if source else "from" not in line
    assert compat.SUPPORTED["torch"].contains(torch)


def test_torch_can_be_chosen(path_with_gpus):
    line = plan("--torch", "2.12.0", "--torch-index", "https://example.org/x", PATH=path_with_gpus("7.0"))["torch"]
    assert line == "2.12.0 (as asked for) from https://example.org/x"


def test_vllm_is_in_range():
    assert compat.SUPPORTED["vllm"].contains(plan()["vllm"].split(",")[0])


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--torch", "2.9.1"], {}, "torch 2.9.1 is not among 2.10 to 2.14"),
        (["--torch"], {}, "--torch wants a value"),
        (["--fast"], {}, "unknown option --fast"),
        (["--python", "/nowhere/python"], {}, "/nowhere/python is not a Python of 3.11 to 3.13"),
        (["--dry-run"], {"CXX": "no-such-compiler"}, "apt-get install g++"),
    ],
)
def test_bootstrap_refuses_with_what_to_do(arguments, environment, message):
    result = bootstrap(*arguments, **environment)
    assert result.returncode == 1
    assert message in result.stderr


def test_pure_python_needs_no_compiler():
    assert "pure Python" in plan("--pure-python", CXX="no-such-compiler")["superl8"]
