# SPDX-License-Identifier: BSD-3-Clause
"""superl8 eval: lm-eval over local files, on a slice."""

import json
import math
import re

import pytest
import tiny_gguf

from vllm_superl8.checkpoint import gguf_snapshot, superl8_snapshot
from vllm_superl8.quant.container.convert import Recipe, convert
from vllm_superl8.quant.container.source import open_source
from vllm_superl8.tools import cli
from vllm_superl8.tools.eval import PIECE, TEXT, gsm8k_task, pieces, text_task

QUESTIONS = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(6)]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


def test_pieces_are_the_text():
    text = TEXT.read_text()
    found = pieces(text)
    assert "".join(found) == text and max(map(len, found)) <= PIECE
    assert all(piece.startswith(" ") for piece in found[1:])
    assert "".join(pieces("x" * 5000)) == "x" * 5000 and pieces("") == []


def test_examples_are_not_asked(questions, tmp_path):
    task = gsm8k_task(questions, tmp_path, few_shot=2, limit=3)
    asked = [json.loads(line) for line in (tmp_path / "gsm8k.jsonl").read_text().splitlines()]
    assert asked == QUESTIONS[:3] and task["fewshot_config"]["samples"] == QUESTIONS[4:]


def test_what_is_no_task_is_refused(tmp_path, questions):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt: there is no text"):
        text_task(tmp_path / "empty.txt", tmp_path, None)
    with pytest.raises(ValueError, match="it has 6 questions, of which 6 would be examples"):
        gsm8k_task(questions, tmp_path, 6, None)
    questions.write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="wanted JSON lines with question and answer"):
        gsm8k_task(questions, tmp_path, 0, None)


def test_a_file_is_evaluated_with_standard_errors(tmp_path, questions, monkeypatch, capsys):
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "gguf")
    monkeypatch.setattr(superl8_snapshot, "CACHE", tmp_path / "container")
    source = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("qwen2"), "qwen2")
    convert(open_source(source), tmp_path / "m.superl8", Recipe(group=128))
    report = tmp_path / "r.json"
    code = cli.main(
        ["eval", str(tmp_path / "m.superl8"), "--text", str(TEXT), "--gsm8k", str(questions), "--limit", "3",
         "--few-shot", "2", "--max-model-len", "1024", "--json", str(report)]
    )  # fmt: skip
    assert code == 0
    assert re.search(r"bits_per_byte *\|↓ *\|[ \d.]+\|± *\| *0\.\d", capsys.readouterr().out)
    found = json.loads(report.read_text())
    text = found["results"]["text_perplexity"]
    assert text["bits_per_byte,none"] == pytest.approx(math.log2(text["byte_perplexity,none"]), rel=0.05)
    assert text["bits_per_byte_stderr,none"] > 0
    assert 0 <= found["results"]["gsm8k_local"]["exact_match,strict-match"] <= 1
    assert found["n-samples"]["gsm8k_local"]["effective"] == 3
