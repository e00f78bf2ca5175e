# SPDX-License-Identifier: BSD-3-Clause
"""superl8 diagnose: its measures, the layer that it names, and two servers."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny_gguf
import torch

from vllm_superl8.checkpoint import gguf_snapshot, superl8_snapshot
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer
from vllm_superl8.formats import int8
from vllm_superl8.quant.container.convert import Recipe, convert
from vllm_superl8.quant.container.source import open_source
from vllm_superl8.tools import cli
from vllm_superl8.tools.diagnosis import servers
from vllm_superl8.tools.diagnosis.metrics import distance, sqnr_db
from vllm_superl8.tools.diagnosis.report import worst
from vllm_superl8.tools.diagnosis.runs import read_back


def test_sqnr_is_ten_times_the_logarithm_of_powers():
    want = torch.randn(40, 30)
    assert sqnr_db(want * 1.01, want) == pytest.approx(40, abs=1e-3)
    assert sqnr_db(want, want) == math.inf
    assert math.isnan(sqnr_db(want * math.nan, want))
    assert sqnr_db(want, want * 0) == -math.inf
    with pytest.raises(ValueError, match="differ"):
        sqnr_db(want, want[1:])


def test_distance_is_that_of_whole_matrices():
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(50, 20, generator=generator) * 3
    got = want + torch.randn(50, 20, generator=generator) * 0.3
    want[:, 17:] = got[:, 17:] = -math.inf  # padding of the vocabulary
    targets = torch.randint(0, 17, (49,), generator=generator)
    found = distance(((got[i : i + 7], want[i : i + 7]) for i in range(0, 50, 7)), targets)
    p, q = want.double().log_softmax(-1)[:, :17], got.double().log_softmax(-1)[:, :17]
    kld = (p.exp() * (p - q)).sum(-1)
    assert found.tokens == 50
    assert found.kld_mean == pytest.approx(kld.mean().item(), rel=1e-9)
    assert found.kld_median == pytest.approx(kld.quantile(0.5).item(), rel=1e-9)
    assert found.kld_p99 == pytest.approx(kld.quantile(0.99).item(), rel=1e-9)
    assert found.top1 == (p.argmax(-1) == q.argmax(-1)).double().mean()
    loss = -p[:49].gather(1, targets[:, None]).mean()
    assert found.reference_perplexity == pytest.approx(loss.exp().item(), rel=1e-9)
    assert found.perplexity != found.reference_perplexity
    assert 5 < found.logits_db < 40


def test_distance_of_a_model_from_itself_is_nothing():
    logits = torch.randn(9, 20)
    found = distance([(logits, logits)], torch.arange(8))
    assert (found.kld_mean, found.kld_max, found.top1, found.logits_db) == (0, 0, 1, math.inf)


def test_nan_logits_do_not_pass_for_near_ones():
    logits = torch.randn(9, 20)
    found = distance([(logits * math.nan, logits)], torch.arange(8))
    assert not found.kld_mean < 1e9 and not found.logits_db > -1e9


def test_read_back_is_the_cache_format():
    k, v = torch.randn(37, 2 * 64) + 0.5, torch.randn(37, 2 * 64)
    got_k, got_v = read_back(k, v, "int8", heads=2, head_dim=64)
    for got, x in ((got_k, k), (got_v, v)):
        codes, scales = int8.quantize(x.unflatten(1, (2, 64)), -1)
        assert torch.equal(got, int8.dequantize(codes, scales).flatten(1))
    assert torch.equal(read_back(k, v, "fp32", heads=2, head_dim=64)[0], k)


def test_worst_begins_with_what_is_no_number():
    values = {"a": 3.0, "b": math.nan, "c": 1.0, "d": math.inf}
    assert [name for name, _ in worst(values)] == ["b", "c", "a", "d"]


def damage(path, name):
    """Rewrite a file with every fourth row of a tensor's codes negated."""
    file = Superl8File(path)
    with Superl8Writer(path.with_name("damaged.superl8")) as writer:
        for key, blob in file.header.tensors.items():
            values = file.tensor(key).clone()
            if key == name:
                values[::4] *= -1
            writer.add(key, values, blob.scheme, scale=blob.scale, group_size=blob.group_size)
        for key in file.header.files:
            writer.add_file(key, file.file(key))
        writer.meta = file.header.meta
    return path.with_name("damaged.superl8")


def test_diagnose_names_the_damaged_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gguf_snapshot, "CACHE", tmp_path / "gguf")
    monkeypatch.setattr(superl8_snapshot, "CACHE", tmp_path / "container")
    source = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.model("qwen2"), "qwen2")
    convert(open_source(source), tmp_path / "m.superl8", Recipe(group=128))
    damaged = damage(tmp_path / "m.superl8", "model.layers.1.mlp.down_proj.weight")
    code = cli.main(
        ["diagnose", str(damaged), "--reference", str(source), "--kv", "int8", "--context", "40,120",
         "--dtype", "float32", "--json", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html"),
         "--max-kld", "0.001"]
    )  # fmt: skip
    assert code == 1
    printed = capsys.readouterr()
    assert re.search(r"linear layers.*\n +-?\d+\.\d  model\.layers\.1\.mlp\.down_proj\n", printed.out)
    assert "above 0.001" in printed.err
    found = json.loads((tmp_path / "d.json").read_text())["results"][0]
    assert set(found["contexts"]) == {"40", "120"} and found["contexts"]["120"]["tokens"] == 120
    gemm = dict(worst(found["gemm"]))
    name, ratio = next(iter(gemm.items()))
    others = [value for other, value in gemm.items() if other != name]
    assert name == "model.layers.1.mlp.down_proj" and ratio < 10 and min(others) > 25
    assert len(gemm) == 12 and len(found["k"]) == len(found["v"]) == len(found["attention"]) == 3
    assert min(*found["k"].values(), *found["v"].values()) > 30
    layer, _ = worst(found["layer"])[0]
    assert layer == "model.layers.1"
    # The damage reaches the layers after it, though each of them is right when it gets the right input.
    assert found["layer"]["model.layers.2"] > found["accumulated"]["model.layers.2"] + 10
    assert found["accumulated"]["model.layers.0"] > found["accumulated"]["model.layers.1"] + 10
    page = (tmp_path / "d.html").read_text()
    assert page.count("<svg") == 6 and "model.layers.1.mlp.down_proj" in page and "http" not in page


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "name a model, or two --servers"),
        (["x.superl8"], "is quantised; name the checkpoint that it was made from"),
        (["m", "--context", "1"], "--context 1: wanted numbers of at least 2"),
        (["m", "--kv", ","], "wanted words with commas"),
        (["m", "--act", "int4"], "--act int4: choose among"),
        (["m", "--text", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments_are_refused(arguments, match, capsys):
    assert cli.main(["diagnose", *arguments]) == 1
    assert re.search(match, capsys.readouterr().err)


TOKENS = {" a": 0.5, " b": 0.3, " c": 0.15}


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server in the form of vLLM or of llama.cpp, with shifted probabilities."""

    form, shift, asked = "openai", 0.0, 0

    def do_GET(self):
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self):
        type(self).asked += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (
            request["model"] == "tiny" and request["max_tokens"] == 1 and len(request["prompt"]) <= servers.CHARACTERS
        )
        moved = {" a": -self.shift, " b": self.shift, " c": 0}
        logprobs = {token: math.log(p + moved[token]) for token, p in TOKENS.items()}
        if self.form == "openai":
            found = {"top_logprobs": [logprobs]}
        elif self.form == "llama.cpp":
            found = {"content": [{"top_logprobs": [{"token": k, "logprob": v} for k, v in logprobs.items()]}]}
        else:
            found = None
        self.answer({"choices": [{"text": " a", "logprobs": found}]})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """Starts servers of a form and shift; gives their URLs."""
    running = []

    def start(form, shift=0.0):
        handler = type("Handler", (Server,), {"form": form, "shift": shift, "asked": 0})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1", handler

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_equal_servers_of_two_kinds_do_not_differ(serve, tmp_path, capsys):
    (first, handler), (second, _) = serve("openai"), serve("llama.cpp")
    report = tmp_path / "s.json"
    assert cli.main(["diagnose", "--servers", first, second, "--prompts", "9", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["kld_mean"] < 1e-9 and found["top1"] == 1 and found["prompts"] == handler.asked == 9
    assert "tiny at http://127.0.0.1" in capsys.readouterr().out


def test_servers_differ_by_the_divergence_of_what_they_say(serve, capsys):
    (first, _), (second, _) = serve("openai"), serve("llama.cpp", 0.15)
    found = servers.compare(first, second, "word " * 100, prompts=4)
    kld = 0.5 * math.log(0.5 / 0.35) + 0.3 * math.log(0.3 / 0.45)
    assert found["kld_mean"] == pytest.approx(kld, rel=1e-6) and found["top1"] == 0
    assert cli.main(["diagnose", "--servers", first, second, "--prompts", "4", "--max-kld", "0.001"]) == 1


def test_tokens_that_the_other_does_not_list_count_as_its_least():
    got = {"a": math.log(0.9), "b": math.log(0.05)}
    assert servers.divergence({"a": math.log(0.5), "z": math.log(0.4)}, got) > 0.4
    assert servers.divergence(got, got) < 1e-9


def test_servers_that_give_nothing_are_named(serve):
    (first, _), (second, _) = serve("openai"), serve("none")
    with pytest.raises(ValueError, match=r"/completions gave no log-probabilities"):
        servers.compare(first, second, "word " * 100, prompts=2)
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/v1/models cannot be asked"):
        servers.compare("http://127.0.0.1:9/v1", second, "word " * 100, prompts=2)
