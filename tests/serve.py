# SPDX-License-Identifier: BSD-3-Clause
"""Helpers to run `vllm serve` as a user does."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

VLLM = Path(sys.executable).with_name("vllm")
START_SECONDS = 300


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_serve(*arguments: str, seconds: float = 240) -> subprocess.CompletedProcess:
    """`vllm serve ARGUMENTS` until it ends by itself, which is expected within the limit."""
    command = [str(VLLM), "serve", *arguments, "--port", str(free_port())]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds)


def wait_until_healthy(process, url, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vllm serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"vllm serve did not answer within {START_SECONDS} s:\n{log.read_text()[-4000:]}")
