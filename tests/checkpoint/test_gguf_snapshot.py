# SPDX-License-Identifier: BSD-3-Clause
"""The cached folder of a GGUF file: whole or absent, made once, made again when the file changes."""

import json

import pytest
import tiny_gguf
from test_gguf_config import header_of, with_metadata
from transformers import AutoConfig, AutoTokenizer

from vllm_superl8.checkpoint import gguf_snapshot
from vllm_superl8.checkpoint.gguf_header import read_model
from vllm_superl8.checkpoint.gguf_snapshot import snapshot

NOTHING = lambda config: None  # noqa: E731


@pytest.fixture
def header(tmp_path):
    return header_of(tmp_path)[1]


def test_snapshot_holds_what_vllm_reads(header, tmp_path):
    folder = snapshot(header, NOTHING, cache=tmp_path / "cache")
    assert folder.parent == tmp_path / "cache" and folder.name.startswith("qwen2-")
    assert AutoConfig.from_pretrained(folder).architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny_gguf.TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_snapshot_is_made_once(header, tmp_path):
    calls = []
    first = snapshot(header, calls.append, cache=tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert snapshot(header, calls.append, cache=tmp_path) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == written
    assert len(calls) == 1


def test_snapshot_follows_the_file(header, tmp_path):
    path = tiny_gguf.write(
        tmp_path / "x.gguf", tiny_gguf.model("qwen2"), "qwen2", extra=lambda w: w.add_quantization_version(2)
    )
    assert snapshot(read_model(path), NOTHING, cache=tmp_path) != snapshot(header, NOTHING, cache=tmp_path)


def test_snapshot_follows_the_converting_packages(header, tmp_path, monkeypatch):
    first = snapshot(header, NOTHING, cache=tmp_path)
    monkeypatch.setattr(gguf_snapshot, "REVISION", gguf_snapshot.REVISION + 1)
    assert snapshot(header, NOTHING, cache=tmp_path) != first


@pytest.mark.parametrize("broken", ["check", "tokenizer"])
def test_snapshot_leaves_nothing_behind_when_it_fails(header, tmp_path, broken):
    def check(config):
        if broken == "check":
            raise ValueError("no")

    if broken == "tokenizer":
        header = with_metadata(header, tokenizer__ggml__model="rwkv")
    with pytest.raises(ValueError):
        snapshot(header, check, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*")) and not list((tmp_path / "cache").glob(".*"))


def test_snapshot_takes_the_folder_of_a_faster_process(header, tmp_path, monkeypatch):
    """Another process finishes the same folder while this one writes its own."""
    write = gguf_snapshot.write_tokenizer

    def slow(header, folder):
        write(header, folder)
        monkeypatch.setattr(gguf_snapshot, "write_tokenizer", write)
        snapshot(header, NOTHING, cache=tmp_path / "cache")

    monkeypatch.setattr(gguf_snapshot, "write_tokenizer", slow)
    folder = snapshot(header, NOTHING, cache=tmp_path / "cache")
    assert (folder / "config.json").is_file()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_snapshot_without_tokenizer_needs_none(header, tmp_path):
    unreadable = with_metadata(header, tokenizer__ggml__model="rwkv")
    folder = snapshot(unreadable, NOTHING, tokenizer=False, cache=tmp_path)
    assert not (folder / "tokenizer.json").exists() and (folder / "config.json").exists()
    assert folder.name.endswith("-no-tokenizer")


def test_snapshot_says_where_it_must_write(header, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file must be writable: qwen2\.gguf gets its config\.json there"):
        snapshot(header, NOTHING, cache=tmp_path / "file")
