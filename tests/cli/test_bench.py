"""`edgeinfer bench` as a user and a script see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_S

from edgeinfer.bench.batching import BATCH, PREFIX
from edgeinfer.bench.report import FIELDS, JSON_ONLY_FIELDS
from edgeinfer.bench.speculation import SPECULATION
from edgeinfer.bench.workloads import WORKLOADS


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.mark.model
def test_rows_have_llama_benchs_fields_and_ours(smollm2_gguf: Path) -> None:
    done = _run(smollm2_gguf, "-p", "8", "-n", "4", "-d", "0,8", "-r", "2", "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (8, 0, 0),
        (0, 4, 0),
        (8, 0, 8),
        (0, 4, 8),
    ]
    for row in rows:
        assert list(row) == [*FIELDS, *JSON_ONLY_FIELDS]
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        assert row["avg_ts"] > 0
        assert row["load_ms"] > 0
        assert row["model_n_params"] == 134_515_008
        assert (row["ttft_ms"] is None) == (row["n_prompt"] == 0)
        assert (row["itl_p50_ms"] is None) == (row["n_gen"] == 0)
        assert (row["fraction_of_bandwidth"] is None) == (row["n_gen"] == 0)


@pytest.mark.model
def test_a_failure_after_rows_leaves_a_valid_document(smollm2_gguf: Path, tmp_path: Path) -> None:
    done = _run(smollm2_gguf, tmp_path / "none.gguf", "-p", "4", "-n", "0", "-r", "1", "-o", "json")
    assert done.returncode == 3
    row, error = json.loads(done.stdout)
    assert row["n_prompt"] == 4
    assert error["error"]["code"] == "not_found"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["-p", "x"], ["-r", "0"], ["-n", "-1"], ["-p", "0", "-n", "0"]])
def test_a_wrong_number_is_exit_code_2_and_valid_json(tmp_path: Path, arguments: list[str]) -> None:
    done = _run(tmp_path / "any.gguf", *arguments, "-o", "json")
    assert done.returncode == 2
    assert json.loads(done.stdout)[0]["error"]["code"] == "usage"


def test_what_fails_at_once_leaves_no_head_of_a_table(tmp_path: Path) -> None:
    done = _run(tmp_path / "none.gguf")
    assert (done.returncode, done.stdout) == (3, "")


def test_an_unknown_format_is_exit_code_2(tmp_path: Path) -> None:
    assert _run(tmp_path / "any.gguf", "-o", "xml").returncode == 2


@pytest.mark.model
def test_the_batch_suite_has_llama_batched_benchs_figures(smollm2_gguf: Path) -> None:
    done = _run(smollm2_gguf, "--suite", "batch", "-p", "16", "-n", "4", "--parallel", "1,3", "-o", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(row) for row in rows] == [list(BATCH.fields)] * 2
    assert [(row["pp"], row["tg"], row["pl"], row["n_kv"]) for row in rows] == [(16, 4, 1, 20), (16, 4, 3, 60)]
    for row in rows:
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"], abs=1e-5)
        assert row["speed"] == pytest.approx(row["n_kv"] / row["t"], rel=1e-3)
        assert row["speed_tg"] == pytest.approx(
            3 * row["pl"] / row["t_tg"], rel=1e-3
        )  # one of four came with the prompt


@pytest.mark.model
def test_the_prefix_suite_tells_what_sharing_saves(smollm2_gguf: Path) -> None:
    done = _run(smollm2_gguf, "--suite", "prefix", "-p", "96", "-n", "2", "--parallel", "4", "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [list(row) for row in rows] == [list(PREFIX.fields)] * 3
    assert [(row["state"], row["cached_tokens"]) for row in rows] == [("none", 0), ("cold", 3 * 96), ("warm", 4 * 96)]


@pytest.mark.parametrize("suite", ["batch", "prefix"])
@pytest.mark.parametrize("arguments", [["-p", "0"], ["--parallel", "0"], ["--parallel", "500"], ["--parallel", "x"]])
def test_a_wrong_width_is_exit_code_2(tmp_path: Path, suite: str, arguments: list[str]) -> None:
    done = _run(tmp_path / "any.gguf", "--suite", suite, *arguments, "-o", "json")
    assert done.returncode == 2
    assert json.loads(done.stdout)[0]["error"]["code"] == "usage"


def test_an_unknown_suite_is_exit_code_2(tmp_path: Path) -> None:
    assert _run(tmp_path / "any.gguf", "--suite", "kv").returncode == 2


@pytest.mark.model
def test_the_speculation_suite_answers_every_workload_both_ways(smollm2_gguf: Path) -> None:
    done = _run(smollm2_gguf, "--suite", "speculation", "-n", "12", "-r", "1", "-o", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["workload"] for row in rows] == [workload.name for workload in WORKLOADS]
    for row in rows:
        assert list(row) == list(SPECULATION.fields)
        assert row["draft"] == "auto"
        assert row["plain_ts"] > 0
        assert row["draft_ts"] > 0
        assert row["n_prompt"] > 10
        assert row["n_gen"] <= 12
