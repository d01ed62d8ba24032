"""`edgeinfer bench` as a user and a script see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.bench.report import FIELDS, JSON_ONLY_FIELDS


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


@pytest.mark.parametrize("arguments", [["-p", "x"], ["-r", "0"], ["-n", "-1"]])
def test_a_wrong_number_is_exit_code_2_and_valid_json(tmp_path: Path, arguments: list[str]) -> None:
    done = _run(tmp_path / "any.gguf", *arguments, "-o", "json")
    assert done.returncode == 2
    assert json.loads(done.stdout)[0]["error"]["code"] == "usage"


def test_an_unknown_format_is_exit_code_2(tmp_path: Path) -> None:
    assert _run(tmp_path / "any.gguf", "-o", "xml").returncode == 2
