"""`edgeinfer bench` as a user and a script see it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_S

from edgeinfer.bench import suites
from edgeinfer.bench.batching import BATCH, PREFIX
from edgeinfer.bench.kv import KV
from edgeinfer.bench.latency import LATENCY
from edgeinfer.bench.report import FIELDS, JSON_ONLY_FIELDS, THROUGHPUT, Schema
from edgeinfer.bench.speculation import SPECULATION
from edgeinfer.bench.workloads import WORKLOADS
from edgeinfer.cli.app import app


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


@pytest.mark.parametrize("asked", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
@pytest.mark.parametrize("wrong", [["--wild"], ["-r", "few"], []], ids=["flag", "value", "no model"])
def test_a_command_line_that_cannot_be_read_is_a_valid_document_too(asked: list[str], wrong: list[str]) -> None:
    done = _run(*(["m.gguf"] if wrong else []), *asked, *wrong)
    assert done.returncode == 2
    (error,) = json.loads(done.stdout)
    assert error["error"]["code"] == "usage"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("format_", "n_lines"), [("jsonl", 1), ("csv", 0), ("sql", 0), ("md", 0), ("xml", 0)])
def test_an_unknown_flag_has_the_formats_own_end(format_: str, n_lines: int) -> None:
    done = _run("m.gguf", "--wild", "-o", format_)
    assert (done.returncode, len(done.stdout.splitlines())) == (2, n_lines)


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
    done = _run(tmp_path / "any.gguf", "--suite", "wild", "-o", "json")
    assert done.returncode == 2
    assert "'wild'" in json.loads(done.stdout)[0]["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "latency", "-p", "5"],
        ["--suite", "batch", "-d", "5"],
        ["--suite", "speculation", "--parallel", "2"],
        ["--suite", "all", "-o", "csv"],
    ],
)
def test_what_a_suite_has_no_use_for_is_exit_code_2(tmp_path: Path, arguments: list[str]) -> None:
    done = _run(tmp_path / "any.gguf", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.model
def test_the_kv_suite_tells_what_a_smaller_type_saves_and_changes(smollm2_gguf: Path) -> None:
    done = _run(smollm2_gguf, "--suite", "kv", "-p", "4", "-n", "2", "-d", "40", "-r", "1", "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [list(row) for row in rows] == [list(KV.fields)] * 3
    assert [(row["type_k"], row["type_v"]) for row in rows] == [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")]
    f16, q8_0, q4_0 = (row["kv_bytes_per_token"] for row in rows)
    elements = 30 * 2 * 192  # layers, K and V, three heads of 64
    assert f16 == pytest.approx(2 * elements, rel=0.01)
    assert q8_0 == pytest.approx(34 / 32 * elements, rel=0.02)
    assert q4_0 == pytest.approx(18 / 32 * elements, rel=0.03)
    assert [row["same_top"] for row in rows[:2]] == [1, pytest.approx(1, abs=0.15)]
    assert rows[0]["gen_ratio"] == rows[0]["prompt_ratio"] == 1
    assert all(row["gen_ts"] > 0 and row["prompt_ts"] > 0 for row in rows)


def test_types_that_cannot_be_are_rows_without_figures(tiny_gguf: Path) -> None:
    done = _run(tiny_gguf, "--suite", "kv", "-p", "1", "-n", "1", "-d", "0", "-r", "1", "-fa", "off", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = {row["type_v"]: row["gen_ts"] is None for row in json.loads(done.stdout)}
    assert found == {"f16": False, "q8_0": True, "q4_0": True}


def test_all_suites_follow_each_other_in_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def suite(name: str, schema: Schema) -> Any:
        def begin(what: Any, options: Any) -> Any:
            asked.append((name, what.n_prompt, what.n_gen, what.n_depth, what.parallel))
            row = dict.fromkeys(schema.fields, 1) | {"model_type": name, "workload": "w", "state": "s", "type_k": "f16"}
            return schema, iter([row | {"type_v": "f16", "build_commit": "b"}])

        return begin

    schemas = {"throughput": THROUGHPUT, "latency": LATENCY, "speculation": SPECULATION}
    schemas |= {"batch": BATCH, "prefix": PREFIX, "kv": KV}
    monkeypatch.setattr(suites, "_SUITES", {name: suite(name, schema) for name, schema in schemas.items()})
    app(args=["bench", "m.gguf", "--suite", "all", "-n", "7", "-o", "json"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)
    assert [row["suite"] for row in rows] == list(schemas)
    assert asked[0] == ("throughput", (512,), (7,), (0,), ())
    assert asked[-1] == ("kv", (128,), (7,), (512, 4096), ())
    app(args=["bench", "m.gguf", "--suite", "all", "-o", "sql"], standalone_mode=False)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(capsys.readouterr().out)
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert tables == {schema.table for schema in schemas.values()}
    app(args=["bench", "m.gguf", "--suite", "all"], standalone_mode=False)
    assert [len(part.splitlines()) for part in capsys.readouterr().out.split("\n\n")] == [*([3] * len(schemas)), 1]


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
