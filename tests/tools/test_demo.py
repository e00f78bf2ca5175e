# SPDX-License-Identifier: BSD-3-Clause
"""demo starts a server, asks it, and takes it down again. A small HTTP server stands for vLLM."""

import socket
import sys
from pathlib import Path

import pytest

from vllm_superl8.tools import cli, demo

from serve import free_port

SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["model"] + " heard: " + asked["messages"][-1]["content"]
        message = {"role": "assistant", "content": text}
        self.reply({"id": "1", "object": "chat.completion", "created": 1, "model": asked["model"],
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Function that makes demo start this Python source instead of vLLM."""
    monkeypatch.setattr(demo, "fetch", lambda name, to: Path(f"{name}.gguf"))

    def stands_for_vllm(source: str) -> None:
        monkeypatch.setattr(demo, "serve_command", lambda model, port: [sys.executable, "-c", source, str(port)])

    return stands_for_vllm


def test_demo_prints_the_answer_and_stops_the_server(server, capsys):
    server(SERVER)
    port = free_port()
    assert cli.main(["demo", "--once", "--port", str(port), "--question", "Who?"]) == 0
    assert "Q: Who?\nA: smollm2 heard: Who?\n" in capsys.readouterr().out
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server still runs"


def test_demo_shows_the_log_of_a_server_that_ends(server, capsys):
    server("import sys; sys.exit('no such model')")
    assert cli.main(["demo", "--once", "--port", str(free_port())]) == 1
    error = capsys.readouterr().err
    assert "no such model" in error
    assert "ended with exit code 1" in error


def test_demo_refuses_a_port_in_use(server, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert cli.main(["demo", "--port", str(port)]) == 1
    assert f"port {port} cannot be used" in capsys.readouterr().err


def test_demo_serves_with_the_plugin():
    command = demo.serve_command(Path("/models/x.gguf"), 8001)
    assert command[1:5] == ["serve", "/models/x.gguf", "--quantization", "superl8"]
    assert Path(command[0]) == Path(sys.executable).with_name("vllm")
