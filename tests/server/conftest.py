# SPDX-License-Identifier: BSD-3-Clause
"""A real `vllm serve` process for the tests."""

import subprocess

import pytest

from vllm_superl8.tools.fetch import fetch

from serve import VLLM, environment, free_port, wait_until_healthy


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Base URL and model name of a server on SmolLM2 with prefix caching and small prefill chunks.

    In float32, where rounding does not decide which of two near-equal tokens is the greedy one, and with group128: the
    first token of the tests' answer is 0.08 nats above the next one, and in blocks rounding to int8 puts it below.
    """
    model, port = str(fetch("smollm2")), free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        str(VLLM), "serve", model, "--quantization", "superl8", "--port", str(port), "--max-model-len", "2048",
        "--enable-prefix-caching", "--enable-chunked-prefill", "--max-num-batched-tokens", "64",
        "--max-num-seqs", "16", "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20),
        "--additional-config", '{"superl8": {"activation": "group128"}}',
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url, log)
        yield f"{url}/v1", model
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
