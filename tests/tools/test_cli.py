# SPDX-License-Identifier: BSD-3-Clause
"""The superl8 command itself."""

import subprocess
import sys

import pytest

from vllm_superl8 import __version__
from vllm_superl8.tools import cli


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vllm_superl8.tools.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_names_every_command():
    result = run("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"usage: superl8 {command}" in result.stdout


def test_version_is_the_package_version():
    assert run("--version").stdout.strip() == f"vllm-superl8 {__version__}"


def test_unknown_command_is_refused_with_the_known_ones():
    result = run("docter")
    assert result.returncode == 2
    assert "'docter'" in result.stderr
    assert "doctor" in result.stderr


def test_help_starts_without_torch():
    script = (
        "import sys\nfrom vllm_superl8.tools import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0
