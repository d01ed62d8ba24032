"""`edgeinfer batch` as a shell script sees it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "edgeinfer", "batch"]


def run(*arguments, **options):
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 120, **options}
    return subprocess.run([*COMMAND, *map(str, arguments)], **options)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["missing.gguf", "missing.jsonl"], 3, "missing.jsonl"),
        (["missing.gguf", "-", "--resume"], 2, "--resume"),
        (["missing.gguf", "-"], 3, "missing.gguf"),
        (["missing.gguf", "-", "--parallel", "0"], 2, "--parallel is 0"),
        (["missing.gguf", "here.jsonl", "-o", "here.jsonl", "--resume"], 2, "read and written"),
        (["missing.gguf", "here.jsonl", "-o", "there.jsonl"], 2, "exists already"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_the_contracts_code(arguments, code, says, tmp_path):
    (tmp_path / "here.jsonl").touch()
    (tmp_path / "there.jsonl").touch()
    done = run(*arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert (done.returncode, done.stdout) == (code, b"")
    (line,) = done.stderr.decode().splitlines()
    assert says in line


BAD_ROWS = [
    ("not json", "unusable_input"),
    ("[1, 2]", "unusable_input"),
    ('{"id": "nothing"}', "usage"),
    ('{"id": "both", "prompt": "x", "messages": []}', "usage"),
    ('{"id": "unknown", "prompt": "x", "tempreature": 1}', "usage"),
    ('{"id": "hot", "prompt": "x", "temperature": -1}', "usage"),
    ('{"id": "text", "prompt": "x", "top_k": "many"}', "usage"),
    ('{"id": "nan", "prompt": "x", "top_p": NaN}', "usage"),
    ('{"id": "half", "prompt": "x", "max_tokens": 1.5}', "usage"),
    ('{"id": "none", "prompt": "x", "max_tokens": 0}', "usage"),
    ('{"id": "roles", "messages": [{"role": 1, "content": "x"}]}', "usage"),
    ('{"id": "surrogate", "prompt": "\\ud800"}', "usage"),
    ('{"id": "bias", "prompt": "x", "logit_bias": ["99999999-inf"]}', "usage"),
    ('{"id": ["list"], "prompt": "x"}', "usage"),
    ('{"id": "schema", "prompt": "x", "json_schema": {"not": {}}}', "unusable_input"),
    ('{"id": "schema text", "prompt": "x", "json_schema": "{}"}', "usage"),
    ('{"id": "grammar", "prompt": "x", "grammar": "root ::= root"}', "unusable_input"),
    ('{"id": "both", "prompt": "x", "grammar": "x", "json_schema": {}}', "usage"),
    ('{"id": "stop", "prompt": "x", "json_schema": {"type": "null"}, "stop": "l"}', "usage"),
    (json.dumps({"id": "long", "prompt": "word " * 9000}), "context_overflow"),
]


@pytest.mark.model
def test_good_and_bad_rows_come_out_in_order_with_the_contracts_keys(smollm2_gguf, tmp_path):
    good = [
        {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0},
        {"id": "chat", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "seed": 1, "temp": 1},
        {"id": "stopped", "prompt": "One, two, three, four,", "max_tokens": 20, "temperature": 0, "stop": " s"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text(lines(good[:2]) + "\n" + "".join(text + "\n" for text, _ in BAD_ROWS) + lines(good[2:]))
    done = run(smollm2_gguf, source, "--parallel", 2)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(row) for row in rows] == [["id", "text", "finish_reason", "usage", "error"]] * len(rows)
    bad = rows[2:-1]
    assert [row["error"]["code"] for row in bad] == [code for _, code in BAD_ROWS]
    assert [row["id"] for row in rows[:2]] == [1, "chat"]
    assert (bad[0]["id"], bad[2]["id"]) == (4, "nothing")
    assert [row["error"] for row in (*rows[:2], rows[-1])] == [None] * 3
    assert rows[0]["text"].startswith(" Paris")
    assert rows[0]["finish_reason"] == "length"
    assert rows[-1]["finish_reason"] == "stop"
    assert " s" not in rows[-1]["text"]
    assert b"20 failed" in done.stderr


@pytest.mark.model
def test_resuming_after_a_kill_adds_exactly_what_is_missing(smollm2_gguf, tmp_path):
    rows = [{"id": i, "prompt": f"{i} and {i} is", "max_tokens": 40, "temperature": 0} for i in range(12)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(rows))
    command = [*COMMAND, str(smollm2_gguf), str(source), "-o", str(target), "--parallel", "2"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (target.exists() and target.read_bytes().count(b"\n") >= 3):
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = target.read_bytes()
    target.write_bytes(before + b'{"id": 11, "te')
    assert 3 <= before.count(b"\n") < 12
    done = run(smollm2_gguf, source, "-o", target, "--parallel", 2, "--resume")
    assert (done.returncode, done.stdout) == (0, b"")
    after = target.read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["id"] for line in after.splitlines()] == list(range(12))
    assert f"{len(before.splitlines())} rows are there already".encode() in done.stderr


@pytest.mark.model
def test_standard_streams_and_a_reader_that_leaves(smollm2_gguf):
    rows = lines({"prompt": f"Write about {i}.", "max_tokens": 2} for i in range(3))
    done = run(smollm2_gguf, "-", "-o", "-", "--parallel", 2, stdin=None, input=rows.encode())
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1, 2, 3]
    endless = 'yes \'{"prompt": "x", "max_tokens": 2}\' | ' + " ".join([*COMMAND, str(smollm2_gguf), "-"])
    piped = subprocess.run(
        ["bash", "-c", f"{endless} | head -n 2; echo ${{PIPESTATUS[1]}}"], capture_output=True, timeout=60
    )
    *shown, code = piped.stdout.splitlines()
    assert [json.loads(line)["id"] for line in shown] == [1, 2]
    assert code == b"141"


@pytest.mark.model
def test_ctrl_c_ends_it_soon_and_keeps_what_is_written(smollm2_gguf, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines([{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "ignore_eos": True}]))
    command = [*COMMAND, str(smollm2_gguf), str(source), "-o", str(target)]
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **default) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (target.exists() and target.read_bytes()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert b"--resume goes on" in process.stderr.read()
    assert [json.loads(line)["id"] for line in target.read_bytes().splitlines()] == [1]
