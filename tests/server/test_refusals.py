# SPDX-License-Identifier: BSD-3-Clause
"""`vllm serve` on something that cannot be served: one clear error, a non-zero exit."""

import struct

import pytest

from vllm_superl8.tools.fetch import fetch

from serve import run_serve


def refuse(expected: str, *arguments: str):
    result = run_serve(*arguments)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert expected in output, output[-3000:]


@pytest.fixture(scope="module")
def gguf_bytes():
    return fetch("smollm2").read_bytes()


def test_refuses_a_gguf_cut_short(tmp_path, gguf_bytes):
    path = tmp_path / "short.gguf"
    path.write_bytes(gguf_bytes[: len(gguf_bytes) // 3])
    refuse("short.gguf", str(path), "--quantization", "superl8")


def test_refuses_a_wrong_magic(tmp_path):
    path = tmp_path / "magic.gguf"
    path.write_bytes(b"NOPE" + bytes(4096))
    refuse("magic.gguf", str(path), "--quantization", "superl8")


def test_refuses_an_impossible_tensor_size(tmp_path, gguf_bytes):
    name = b"token_embd.weight"
    at = gguf_bytes.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4  # first dimension
    path = tmp_path / "huge.gguf"
    path.write_bytes(gguf_bytes[:at] + struct.pack("<Q", 1 << 60) + gguf_bytes[at + 8 :])
    refuse("token_embd.weight", str(path), "--quantization", "superl8")


def test_refuses_an_unknown_option():
    refuse(
        "does not know option bits",
        str(fetch("smollm2")),
        "--quantization",
        "superl8",
        "--additional-config",
        '{"superl8": {"bits": 5}}',
    )


def test_refuses_an_unknown_kv_cache_dtype():
    refuse("int9", str(fetch("smollm2")), "--quantization", "superl8", "--kv-cache-dtype", "int9")
