"""`edgeinfer batch` as a shell script sees it."""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import PATIENCE_S, cpu_s_to_the_end, started, watched

COMMAND = [sys.executable, "-m", "edgeinfer", "batch"]


def run(*arguments, **options):
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": PATIENCE_S, **options}
    return subprocess.run([*COMMAND, *map(str, arguments)], **options)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def wait_for_lines(path, n_lines):
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_bytes().count(b"\n") >= n_lines):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["missing.gguf", "missing.jsonl"], 3, "missing.jsonl"),
        (["missing.gguf", "-", "--resume"], 2, "--resume"),
        (["missing.gguf", "-"], 3, "missing.gguf"),
        (["missing.gguf", "-", "--parallel", "0"], 2, "--parallel is 0"),
        (["missing.gguf", "here.jsonl", "-o", "here.jsonl", "--resume"], 2, "read and written"),
        (["missing.gguf", "here.jsonl", "-o", "there.jsonl"], 2, "exists already"),
        (["missing.gguf", "here.jsonl", "-o", "nowhere/out.jsonl"], 5, "make the folder"),
        (["missing.gguf", "missing.jsonl", "-o", "there.jsonl"], 3, "missing.jsonl"),
        (["missing.gguf", "here.jsonl", "-o", "."], 5, "directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_the_contracts_code(arguments, code, says, tmp_path):
    (tmp_path / "here.jsonl").touch()
    (tmp_path / "there.jsonl").write_text("{}\n")
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
    # Its input goes on after eight rows, so that it cannot be done before it is killed.
    command = [*COMMAND, str(smollm2_gguf), "-", "-o", str(target), "--parallel", "2"]
    with watched(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)) as process:
        process.stdin.write(lines(rows[:8]).encode())
        process.stdin.flush()
        wait_for_lines(target, 3)
        process.kill()
    before = target.read_bytes()
    target.write_bytes(before + b'{"id": 11, "te')
    assert 3 <= before.count(b"\n") <= 8
    done = run(smollm2_gguf, source, "-o", target, "--parallel", 2, "--resume")
    assert (done.returncode, done.stdout) == (0, b"")
    after = target.read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["id"] for line in after.splitlines()] == list(range(12))
    assert f"{len(before.splitlines())} rows there already".encode() in done.stderr


@pytest.mark.model
def test_standard_streams_and_a_reader_that_leaves(smollm2_gguf):
    rows = lines({"prompt": f"Write about {i}.", "max_tokens": 2} for i in range(3))
    done = run(smollm2_gguf, "-", "-o", "-", "--parallel", 2, stdin=None, input=rows.encode())
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1, 2, 3]
    endless = 'yes \'{"prompt": "x", "max_tokens": 2}\' | ' + " ".join([*COMMAND, str(smollm2_gguf), "-"])
    piped = subprocess.run(
        ["bash", "-c", f"{endless} | head -n 2; echo ${{PIPESTATUS[1]}}"], capture_output=True, timeout=PATIENCE_S
    )
    *shown, code = piped.stdout.splitlines()
    assert [json.loads(line)["id"] for line in shown] == [1, 2]
    assert code == b"141"


@pytest.mark.model
def test_ctrl_c_ends_it_soon_and_keeps_what_is_written(smollm2_gguf, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines([{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "ignore_eos": True}]))
    with started("batch", smollm2_gguf, source, "-o", target) as process:
        wait_for_lines(target, 1)
        process.send_signal(signal.SIGINT)
        assert cpu_s_to_the_end(process) < 3  # the second answer would go on for minutes
        assert process.returncode == 130
        assert b"--resume goes on" in process.stderr.read()
    assert [json.loads(line)["id"] for line in target.read_bytes().splitlines()] == [1]


def test_ids_that_repeat_themselves_are_all_resumed(tiny_gguf, tmp_path):
    rows = [{"prompt": "a", "max_tokens": 1, **({"id": i} if i else {})} for i in (2, 0, 2, "x", "x", 0)]
    ids = [2, 2, 2, "x", "x", 6]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(rows))
    for cut in range(len(rows) + 1):
        target.write_bytes(b"".join(target.read_bytes().splitlines(True)[:cut]) if cut else b"")
        done = run(tiny_gguf, source, "-o", target, "--resume")
        assert done.returncode == 0, done.stderr
        assert [json.loads(line)["id"] for line in target.read_bytes().splitlines()] == ids


def test_rows_that_are_appended_to_while_they_are_read_are_refused(tiny_gguf, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(lines([{"prompt": "a", "max_tokens": 1}]))
    with source.open("ab") as target:
        done = run(tiny_gguf, source, stdout=target, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2
    assert b"read and written" in done.stderr


@contextlib.contextmanager
def waiting(*arguments, **options):
    """A batch that has answered two rows and waits for more."""
    with started("batch", *arguments, stdin=subprocess.PIPE) as process:
        process.stdin.write(lines([{"prompt": "a", "max_tokens": 2}] * 2).encode())
        process.stdin.flush()
        assert [json.loads(process.stdout.readline())["id"] for _ in range(2)] == [1, 2]
        yield process


@pytest.mark.parametrize("way", ["reader", "SIGINT", "SIGTERM"])
def test_waiting_for_input_it_ends_at_once(tiny_gguf, way):
    with waiting(tiny_gguf, "-") as process:
        if way == "reader":
            process.stdout.close()
        else:
            process.send_signal(getattr(signal, way))
        assert process.wait(PATIENCE_S) == {"reader": 141, "SIGINT": 130, "SIGTERM": 143}[way]
        assert b"Fatal" not in process.stderr.read()


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="a mapped file cannot be cut here")
def test_a_model_that_is_cut_short_while_it_is_used_is_one_line(tiny_gguf, tmp_path):
    model = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, model)
    with waiting(model, "-", "--no-prefix-cache") as process:
        os.truncate(model, 4096)
        _, complaint = process.communicate(lines([{"prompt": "b", "max_tokens": 2}]).encode(), timeout=PATIENCE_S)
        assert process.returncode == 4
    (line,) = complaint.decode().splitlines()
    assert line.startswith(f"error: {model}: became shorter while it was in use")


def test_a_pipe_that_stays_open_does_not_hold_up_ctrl_c(tiny_gguf, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # to open it for writing would wait for one
    with pipe.open("wb", buffering=0) as writer:
        writer.write(lines([{"prompt": "a", "max_tokens": 2}]).encode())
        with started("batch", tiny_gguf, pipe) as process:
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
    os.close(reader)


def test_a_reader_that_leaves_is_noticed_in_the_middle_of_a_row(tiny_gguf):
    rows = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "ignore_eos": True}]
    command = ("batch", tiny_gguf, "-", "-c", 200000, "--no-prefix-cache")
    with started(*command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdin.write(lines(rows).encode())
        process.stdin.close()
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 141


@pytest.mark.parametrize("wait_s", [0, 0.2])  # between two rows, or into the write
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("goes_to_file", [False, True])
def test_a_signal_ends_it_when_nobody_reads_its_pipe(tiny_gguf, tmp_path, name, goes_to_file, wait_s):
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    source.write_text(lines({"id": "i" * 5000 + str(i), "prompt": "a", "max_tokens": 1} for i in range(60)))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output = ("-o", pipe) if goes_to_file else ()
    with (
        pipe.open("wb") as writer,
        started("batch", tiny_gguf, source, "--no-prefix-cache", *output, stdout=writer) as process,
    ):
        wait_until_full(pipe, process)
        time.sleep(wait_s)
        process.send_signal(getattr(signal, name))
        assert process.wait(PATIENCE_S) == {"SIGINT": 130, "SIGTERM": 143}[name]
    os.close(reader)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_the_middle_ends_it_with_its_code_and_resuming_gives_the_rest(tiny_gguf, tmp_path, name):
    rows = [{"id": i, "prompt": "ab " * (i % 9 + 1), "max_tokens": 50, "ignore_eos": True} for i in range(40)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(rows))
    options = ["-o", target, "--parallel", "8", "-c", "100", "--no-prefix-cache"]
    with started("batch", tiny_gguf, source, *options) as process:
        wait_for_lines(target, 2)
        process.send_signal(getattr(signal, name))
        assert process.wait(PATIENCE_S) == 128 + getattr(signal, name)
        last = process.stderr.read().decode().splitlines()[-1]
        assert last.startswith("error: " + ("interrupted" if name == "SIGINT" else "terminated"))
    written = target.read_bytes()
    assert written.endswith(b"\n")
    assert 2 <= written.count(b"\n") < 40
    assert run(tiny_gguf, source, *options, "--resume").returncode == 0
    assert target.read_bytes().startswith(written)
    assert [json.loads(line)["id"] for line in target.read_bytes().splitlines()] == list(range(40))


def test_a_disk_that_is_full_in_the_middle_leaves_what_can_be_resumed(tiny_gguf, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines({"id": i, "prompt": "ab", "max_tokens": 1} for i in range(40)))
    options = ["-o", target, "--no-prefix-cache"]
    limit = 1003  # bytes of a file: a few rows, and a part of one
    done = run(
        tiny_gguf, source, *options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert done.returncode == 5
    assert "out.jsonl: cannot be written" in done.stderr.decode().splitlines()[-1]
    assert b"Traceback" not in done.stderr
    assert target.stat().st_size == limit
    assert not target.read_bytes().endswith(b"\n")
    assert run(tiny_gguf, source, *options, "--resume").returncode == 0
    assert [json.loads(line)["id"] for line in target.read_bytes().splitlines()] == list(range(40))


def test_when_every_row_fails_the_batch_fails(tiny_gguf, tmp_path):
    good, bad = '{"prompt": "a", "max_tokens": 1}\n', "no json\n"
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for content, arguments, code in [
        (2 * bad, [], 4),
        (bad, ["-o", target], 4),
        (2 * bad, ["-o", target, "--resume"], 4),  # one of them now, one before
        (2 * bad + good, ["-o", target, "--resume"], 0),
        (2 * bad + good + bad, ["-o", target, "--resume"], 0),
        ("", [], 0),
    ]:
        source.write_text(content)
        done = run(tiny_gguf, source, *arguments)
        assert done.returncode == code, done.stderr
        assert done.stderr.decode().splitlines()[-1].startswith("error: every row failed") == (code == 4)


def test_a_reader_that_stops_reading_does_not_hold_up_the_end_of_what_is_finished(tiny_gguf, tmp_path):
    """A signal that comes between two writes finds out in the next ones."""
    source = tmp_path / "in.jsonl"
    slow = {"id": 0, "prompt": "a", "ignore_eos": True, "max_tokens": 400}
    done = [{"id": "i" * 5000 + str(i), "prompt": "a", "max_tokens": 1} for i in range(60)]
    source.write_text(lines([slow, *done]))
    with started("batch", tiny_gguf, source, "--parallel", "2", "--no-prefix-cache") as process:
        assert json.loads(process.stdout.readline())["id"] == 0  # all behind it are finished, and too much for a pipe
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        process.stdout.close()


def wait_until_full(pipe, process):
    """Wait until a pipe takes nothing more from anybody."""
    probe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(probe, select.POLLOUT)
    deadline = time.monotonic() + PATIENCE_S
    while poll.poll(0) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.close(probe)
