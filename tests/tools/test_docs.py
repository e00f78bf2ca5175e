# SPDX-License-Identifier: BSD-3-Clause
"""What the documents point at exists."""

import re
import subprocess
from pathlib import Path

import pytest

from vllm_superl8.tools import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_commands_exist(document):
    for command in re.findall(r"(?:bin/|\$\(|`)superl8 ([a-z]+)", document.read_text()):
        assert command in cli.COMMANDS, f"{document.name} names superl8 {command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    for name in re.findall(r"`((?:csrc|vllm_superl8|tests|docs|benchmarks)/[\w./]+)[`:\s]", document.read_text()):
        assert (ROOT / name.rstrip(".:")).exists(), f"{document.name} names {name}"


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)[0]
    for marker, wanted in {"command: serve": "superl8 demo", "command: test": "-m pytest"}.items():
        found = subprocess.check_output(["bash", "-c", f"{function}; readme_command '{marker}'"], cwd=ROOT, text=True)
        assert wanted in found
        assert found.strip() in (ROOT / "README.md").read_text()
