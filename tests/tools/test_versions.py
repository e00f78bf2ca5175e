# SPDX-License-Identifier: BSD-3-Clause
"""vLLM and torch outside the declared ranges are refused with what to install."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vllm_superl8 import compat, plugin
from vllm_superl8.tools import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def versions(monkeypatch):
    """Dictionary that stands for what is installed."""
    installed = {"vllm": "0.33.0", "torch": "2.13.0+cpu"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compat.metadata, "version", version)
    return installed


@pytest.mark.parametrize("vllm", ["0.33.0", "0.33.2", "0.33.0+empty"])
@pytest.mark.parametrize("torch", ["2.10.0", "2.11.0+cu126", "2.13.0+cpu", "2.14.1"])
def test_versions_in_range_are_accepted(versions, vllm, torch):
    versions |= {"vllm": vllm, "torch": torch}
    assert compat.problems() == []


@pytest.mark.parametrize(
    ("name", "version"),
    [("vllm", "0.32.0"), ("vllm", "0.34.0"), ("torch", "2.9.1"), ("torch", "2.15.0"), ("torch", "2.9.1+cu128")],
)
def test_version_out_of_range_is_refused_with_the_command(versions, name, version):
    versions[name] = version
    (problem,) = compat.problems()
    assert f"{name} {version} is installed" in problem
    assert compat.INSTALL[name] in problem
    assert re.search(rf"pip install .*{name}==", problem)


def test_missing_package_is_named(versions):
    del versions["vllm"]
    (problem,) = compat.problems()
    assert problem.startswith("vllm is not installed")


def test_install_commands_give_versions_in_range():
    for name, command in compat.INSTALL.items():
        assert compat.SUPPORTED[name].contains(re.search(rf"\b{name}==(\S+)", command)[1])


def test_package_metadata_declares_the_same_ranges():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, wanted in compat.SUPPORTED.items():
        declared = next(line for line in dependencies if re.match(rf"{name}\b[<>=]", line))
        assert set(declared.removeprefix(name).split(",")) == {str(part) for part in wanted}


def test_plugin_stays_inactive_and_says_why(versions, caplog):
    versions["torch"] = "2.15.0"
    assert plugin.platform() is None
    assert "torch 2.15.0 is installed" in caplog.text
    with pytest.raises(RuntimeError, match=r"torch 2\.15\.0 is installed"):
        plugin.register()


def test_doctor_fails_with_the_command(versions, capsys):
    versions["vllm"] = "0.32.0"
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "broken" in output
    assert compat.INSTALL["vllm"] in output
    assert output.endswith("Models cannot be served here.\n")
