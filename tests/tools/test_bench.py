# SPDX-License-Identifier: BSD-3-Clause
"""Result files hold what their readers rely on; the benchmarks run."""

import copy
import json
from pathlib import Path

import pytest

from vllm_superl8.tools import cli, results
from vllm_superl8.tools.measure import Ceilings, Row

COMMITTED = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*.json"))
GEMM = Row({"op": "w8a8_gemm", "format": "int8", "m": 1, "n": 4096, "k": 4096}, 10.0, 2 * 4096**2, 4096**2, 1e-4)
ATTENTION = Row(
    {
        "op": "paged_attention", "batch": 8, "context": 4096, "q_len": 1, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "kv_format": "int8",
    },
    20.0, None, 10**7, 0.0,
)  # fmt: skip


@pytest.fixture
def result() -> dict:
    rows, ceilings = [GEMM, ATTENTION], Ceilings(dp4a_tops=63.0, hbm_gbps=900.0)
    return results.make_result(rows, ceilings, card="Tesla V100-SXM2-16GB", driver="580.1", torch_version="2.10.0")


def test_shares_are_of_the_ceilings_of_the_same_run(result):
    gemm, attention = result["rows"]
    assert gemm["share_dp4a"] == pytest.approx(2 * 4096**2 / 10e-6 / 63e12, rel=1e-3)
    assert gemm["share_hbm"] == pytest.approx(4096**2 / 10e-6 / 900e9, rel=1e-3)
    assert attention["share_dp4a"] is None
    assert attention["share_hbm"] == pytest.approx(10**7 / 20e-6 / 900e9, rel=1e-3)


def test_result_survives_a_file(result, tmp_path):
    path = results.write(result, "gemm", tmp_path)
    assert path.name == "gemm-tesla-v100-sxm2-16gb.json"
    assert json.loads(path.read_text()) == result
    assert results.read(path) == result


def test_render_has_a_line_for_each_row(result):
    lines = results.render(result).splitlines()
    assert len(lines) == 2 + 1 + len(result["rows"])
    assert "w8a8_gemm" in lines[3]
    assert f"{result['rows'][0]['share_hbm']:.1%}" in lines[3]


def test_commit_names_the_sources(result):
    assert len(result["commit"].split("-")[0].split("+")[0]) in (40, 5)  # a git hash, or version+stamp


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.pop("card"), "card"),
        (lambda r: r.update(date="yesterday"), "date"),
        (lambda r: r["ceilings"].pop("dp4a_tops"), "ceilings: dp4a_tops"),
        (lambda r: r["ceilings"].update(hbm_gbps=0), "ceilings: hbm_gbps"),
        (lambda r: r.update(rows=[]), "rows is empty"),
        (lambda r: r["rows"][0].pop("op"), r"rows\[0\] has no op"),
        (lambda r: r["rows"][0].pop("k"), r"rows\[0\] has .*wanted format, m, n, k or batch"),
        (lambda r: r["rows"][1].pop("kv_format"), r"rows\[1\] has"),
        (lambda r: r["rows"][1].update(us=float("nan")), r"rows\[1\]: us"),
        (lambda r: r["rows"][0].pop("share_dp4a"), r"rows\[0\]: share_dp4a"),
        (lambda r: r["rows"][0].update(share_hbm=None), r"rows\[0\]: share_hbm"),
        (lambda r: r["rows"][0].update(error=float("nan")), r"rows\[0\]: error"),
    ],
)
def test_validate_refuses_what_readers_cannot_use(result, damage, message):
    damaged = copy.deepcopy(result)
    damage(damaged)
    with pytest.raises(results.ResultError, match=message):
        results.validate(damaged)


def test_committed_results_are_valid_and_well_named():
    for path in COMMITTED:
        content = results.read(path)
        assert path.stem.endswith(results.card_slug(content["card"])), path


def test_command_shows_a_file(result, tmp_path, capsys):
    path = results.write(result, "gemm", tmp_path)
    assert cli.main(["bench", "--show", str(path)]) == 0
    assert "Tesla V100" in capsys.readouterr().out


def test_command_names_a_file_that_is_no_result(tmp_path, capsys):
    (tmp_path / "x.json").write_text("[1, 2]")
    assert cli.main(["bench", "--show", str(tmp_path / "x.json")]) == 1
    assert "wanted a dictionary" in capsys.readouterr().err


def test_command_refuses_an_unknown_benchmark(capsys):
    assert cli.main(["bench", "gem"]) == 1
    assert "there is no gem; choose from attention, gemm" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "gemm", "moe", "producers"])
def test_benchmark_runs_and_checks_itself(name, tmp_path):
    assert cli.main(["bench", name, "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob(f"{name}-*.json")
    assert all(row["share_hbm"] < 1.1 for row in results.read(path)["rows"])
