# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 demo``: fetch a small model, start ``vllm serve`` on it, ask it a question, keep serving."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from vllm_superl8.tools.fetch import FetchError, fetch

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
START_SECONDS = 600
KV_CACHE_BYTES = 256 << 20


class DemoError(Exception):
    """The demonstration cannot go on; the message says why and where to look."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="end after the answer instead of serving on")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on (default 8000)")
    parser.add_argument("--question", default=QUESTION, help=f"what to ask (default {QUESTION!r})")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder of the model file")


def run(args: argparse.Namespace) -> int:
    try:
        _check_port(args.port)
        return _serve_and_ask(serve_command(fetch(MODEL, args.to), args.port), args)
    except (DemoError, FetchError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def serve_command(model: Path, port: int) -> list[str]:
    """The ``vllm serve`` command line, of this Python's environment.

    In group128, because two first tokens of the answer are 0.08 nats apart, and in the file's own blocks rounding
    decides for the wrong one.
    """
    return [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--quantization", "superl8",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--max-model-len", "2048",
        "--kv-cache-memory-bytes", str(KV_CACHE_BYTES),
        "--additional-config", '{"superl8": {"activation": "group128"}}',
    ]  # fmt: skip


def _serve_and_ask(command: list[str], args: argparse.Namespace) -> int:
    url = f"http://127.0.0.1:{args.port}"
    log = Path(tempfile.mkdtemp(prefix="superl8-demo-")) / "server.log"
    print(f"$ {shlex.join(command)}\n(its output goes to {log})", flush=True)
    environment = {**os.environ}
    environment.setdefault("HF_HUB_OFFLINE", "1")  # the model is one local file
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        seconds = _wait_until_healthy(server, url, log)
        print(f"ready after {seconds:.0f} s\n\nQ: {args.question}", flush=True)
        print(f"A: {ask(url, args.question)}\n", flush=True)
        if args.once:
            return 0
        print(f"Serving {MODEL} at {url}/v1 until Ctrl-C.", flush=True)
        return server.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
        _stop(server)


def ask(url: str, question: str) -> str:
    """The greedy answer of the server's model, by the openai client."""
    import openai

    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=300, http_client=openai.DefaultHttpxClient(trust_env=False)
    ) as client:
        try:
            reply = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=128
            )
        except openai.OpenAIError as error:
            raise DemoError(f"demo: the server did not answer the question: {error}") from error
    return reply.choices[0].message.content


def _check_port(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise DemoError(f"demo: port {port} cannot be used ({error}); choose another with --port") from error


def _wait_until_healthy(server: subprocess.Popen, url: str, log: Path) -> float:
    """Seconds until the server answered. Raises DemoError with the end of its log if it ends or takes too long."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if server.poll() is not None:
            raise DemoError(f"{_tail(log)}\ndemo: vllm serve ended with exit code {server.returncode}; log: {log}")
        try:
            with direct.open(f"{url}/health", timeout=2):
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise DemoError(f"{_tail(log)}\ndemo: vllm serve was not ready within {START_SECONDS} s; log: {log}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
