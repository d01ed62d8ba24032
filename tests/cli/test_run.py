"""`edgeinfer run` as a shell script sees it."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from processes import PATIENCE_S, cpu_s_to_the_end, ended_cpu_s, started, wait_for_cpu_s

COMMAND = [sys.executable, "-m", "edgeinfer", "run"]
QUESTION = "Why is the sky blue?"


@pytest.fixture(autouse=True)
def always_cold(monkeypatch):
    """Two runs compute in the same batches, so that their texts can be compared; test_cache.py is about the rest."""
    monkeypatch.setenv("EDGEINFER_PREFIX_CACHE_SIZE", "0")


def run(*arguments, stdin=None, **options):
    stdin_options = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=PATIENCE_S, **stdin_options, **options
    )


def error_of(done):
    """The one line of an error."""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["missing.gguf", "hi"], 3, "missing.gguf"),
        (["missing.gguf", "hi", "--temp", "-1"], 2, "--temp is -1"),
        (["missing.gguf", "hi", "--temp", "nan"], 2, "--temp is nan"),
        (["missing.gguf", "hi", "--top-p", "2"], 2, "--top-p is 2"),
        (["missing.gguf", "hi", "--mirostat", "3"], 2, "mirostat is 3"),
        (["missing.gguf", "hi", "-n", "0"], 2, "-n is 0"),
        (["missing.gguf", "hi", "--seed", "-5"], 2, "seed is -5 (give a number from 0 to 4294967294)"),
        (["missing.gguf", "hi", "-c", "0"], 2, "-c/--ctx-size is 0"),
        (["missing.gguf", "hi", "--draft", "wild"], 2, "draft is 'wild'"),
        (["missing.gguf", "hi", "--draft-max", "64"], 2, "--draft-max is 64"),
        (["missing.gguf", "hi", "--cache-type-k", "q3"], 2, "--cache-type-k is 'q3'"),
        (["missing.gguf", "hi", "--flash-attn", "off", "--cache-type-v", "q8_0"], 2, "flash attention"),
        (["missing.gguf", "hi", "--logit-bias", "x"], 2, "logit-bias"),
        (["missing.gguf", "hi", "--logit-bias", "5+nan"], 2, "logit_bias of token 5 is nan"),
        (["x" * 5000, "hi"], 3, "no such model"),
        (["missing.gguf", "-f", "/dev/zero"], 2, "longer than"),
        (["missing.gguf", "-f", "."], 4, "Is a directory"),
        ([], 3, "no model is named"),
        (["missing.gguf", "hi", "-f", "prompt.txt"], 2, "both PROMPT and -f"),
        (["missing.gguf", "-f", "missing.txt"], 3, "missing.txt"),
        (["missing.gguf", "hi", "--raw", "-s", "x"], 2, "--raw"),
        (["missing.gguf", "hi", "--raw", "--session", "x"], 2, "--raw"),
        (["missing.gguf", "hi", "--session", "../x"], 2, "'../x' cannot name a session"),
        (["missing.gguf", "hi", "--on-overflow", "panic"], 2, "--on-overflow is 'panic'"),
        (["missing.gguf", "hi", "--json-schema", '{"not": {}}'], 4, "'not'"),
        (["missing.gguf", "hi", "--json-schema", '{"type": '], 4, "not JSON"),
        (["missing.gguf", "hi", "--json-schema", "missing.json"], 3, "missing.json"),
        (["missing.gguf", "hi", "--json-schema", "true", "--grammar", "x"], 2, "both"),
        (["missing.gguf", "hi", "--grammar", "missing.gbnf"], 3, "missing.gbnf"),
        (["missing.gguf", "--json-schema", "true"], 2, "no prompt"),
        (["missing.gguf", "hi", "--logprobs", "3"], 2, "--json"),
        (["missing.gguf"], 2, "no prompt"),
        (["missing.gguf", ""], 2, "prompt is empty"),
        (["missing.gguf", b"\xff\xfe"], 2, "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_the_contracts_code(arguments, code, says, tmp_path):
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": PATIENCE_S, "cwd": tmp_path}
    done = subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **options
    )
    assert (done.returncode, done.stdout) == (code, b"")
    assert says in error_of(done)


def test_a_prompt_file_that_is_not_utf8_is_a_usage_error(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    done = run("missing.gguf", "-f", tmp_path / "prompt.txt")
    assert done.returncode == 2
    assert "not UTF-8 (byte 3)" in error_of(done)


def test_a_file_that_is_no_gguf_is_unusable(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello" * 100)
    done = run(tmp_path / "x.gguf", "hi")
    assert done.returncode == 4
    assert "not a GGUF file" in error_of(done)


def test_a_failure_is_json_when_json_is_asked_for():
    done = run("missing.gguf", "hi", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "not_found"


def test_behind_two_dashes_nothing_is_an_option():
    done = run("missing.gguf", "--", "--json")
    assert (done.returncode, done.stdout) == (3, b"")


def test_a_standard_input_that_cannot_be_read_is_one_line(tmp_path):
    with open(tmp_path / "x", "w") as written:
        done = subprocess.run([*COMMAND, "missing.gguf"], stdin=written, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 4
    assert "standard input cannot be read" in error_of(done)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_full_disk_is_a_matter_of_resources(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND[:3], *arguments], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert done.returncode == 5
    error_of(done)


pytest_model = pytest.mark.model


@pytest_model
def test_the_answer_and_one_newline_are_all_of_stdout(smollm2_gguf):
    done = run(smollm2_gguf, QUESTION, "-n", 12, "--temp", 0)
    assert done.returncode == 0
    assert done.stderr == b""
    text = done.stdout.decode()
    assert text.endswith("\n")
    assert text == text.strip() + "\n"
    assert run(smollm2_gguf, QUESTION, "-n", 12, "--temp", 0).stdout == done.stdout


@pytest_model
def test_argument_file_and_pipe_are_the_same_prompt(smollm2_gguf, tmp_path):
    (tmp_path / "prompt.txt").write_text(QUESTION)
    flags = ["-n", 6, "--temp", 0]
    answers = [
        run(smollm2_gguf, QUESTION, *flags).stdout,
        run(smollm2_gguf, "-f", tmp_path / "prompt.txt", *flags).stdout,
        run(smollm2_gguf, *flags, stdin=f"{QUESTION}\n".encode()).stdout,
    ]
    assert len(set(answers)) == 1


@pytest_model
def test_piped_input_follows_the_prompt_after_a_blank_line(smollm2_gguf):
    flags = ["-n", 2, "--temp", 0, "--json"]
    joined = json.loads(run(smollm2_gguf, "Summarize:\n\nsome text", *flags).stdout)
    piped = json.loads(run(smollm2_gguf, "Summarize:", *flags, stdin=b"some text\n").stdout)
    assert piped["usage"] == joined["usage"]
    assert piped["text"] == joined["text"]


@pytest_model
def test_the_envelope_has_the_contracts_keys(smollm2_gguf):
    answer = json.loads(run(smollm2_gguf, QUESTION, "-n", 4, "--seed", 7, "--json").stdout)
    assert list(answer) == ["model", "kernels", "text", "finish_reason", "seed", "usage", "timings"]
    assert list(answer["usage"]) == [
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "drafted_tokens",
        "accepted_tokens",
    ]
    assert list(answer["timings"]) == ["load_ms", "prefill_ms", "ttft_ms", "decode_ms", "decode_tps"]
    assert (answer["seed"], answer["finish_reason"], answer["usage"]["completion_tokens"]) == (7, "length", 4)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}


@pytest_model
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_for_a_schema_is_valid_json(smollm2_gguf, tmp_path, seed):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    flags = [
        "--json-schema",
        tmp_path / "person.json",
        "--temp",
        1,
        "--seed",
        seed,
        "-n",
        200,
        "--json",
        "--logprobs",
        2,
    ]
    answer = json.loads(run(smollm2_gguf, "Describe a person.", *flags).stdout)
    assert answer["finish_reason"] == "schema"
    person = json.loads(answer["text"])
    assert list(person) == ["name", "age"]
    assert len(person["name"]) <= 20
    assert 0 <= person["age"] <= 120
    pieces = [entry["piece"] for entry in answer["logprobs"]]  # a list of bytes where it is half a character
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces).decode() == answer["text"]
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])


@pytest_model
def test_an_answer_for_a_grammar_is_one_of_it(smollm2_gguf, tmp_path):
    (tmp_path / "answer.gbnf").write_text('root ::= ("yes" | "no") "."')
    done = run(smollm2_gguf, QUESTION, "--grammar", tmp_path / "answer.gbnf")
    assert done.stdout in (b"yes.\n", b"no.\n")


@pytest_model
def test_a_seed_gives_the_same_text_again(smollm2_gguf):
    first = json.loads(run(smollm2_gguf, QUESTION, "-n", 10, "--json").stdout)
    again = json.loads(run(smollm2_gguf, QUESTION, "-n", 10, "--json", "--seed", first["seed"]).stdout)
    assert again["text"] == first["text"]


@pytest_model
def test_stop_strings_end_the_answer(smollm2_gguf):
    whole = run(smollm2_gguf, QUESTION, "-n", 12, "--temp", 0).stdout.decode()
    word = whole.split()[3]
    answer = json.loads(run(smollm2_gguf, QUESTION, "-n", 12, "--temp", 0, "--stop", word, "--json").stdout)
    assert answer["text"] == whole[: whole.index(word)]
    assert answer["finish_reason"] == "stop"


@pytest_model
def test_a_prompt_longer_than_the_context_is_refused_before_the_work(smollm2_gguf):
    done = run(smollm2_gguf, "word " * 600, "-c", 256)
    assert done.returncode == 6
    assert "context holds 256" in error_of(done)


@pytest_model
def test_a_directory_with_one_model_names_it(smollm2_gguf, tmp_path):
    (tmp_path / "model.gguf").symlink_to(smollm2_gguf)
    assert run(tmp_path, QUESTION, "-n", 1).returncode == 0
    (tmp_path / "other.gguf").symlink_to(smollm2_gguf)
    done = run(tmp_path, QUESTION, "-n", 1)
    assert done.returncode == 3
    assert "model.gguf, other.gguf" in error_of(done)


@pytest_model
def test_a_reader_that_leaves_ends_it_quietly_and_at_once(smollm2_gguf):
    with started("run", smollm2_gguf, "Count to ten thousand.", "--ignore-eos") as process:
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert cpu_s_to_the_end(process) < 5  # the answer would go on for minutes
        assert process.returncode == 141
        assert process.stderr.read() == b""


@pytest_model
def test_head_ends_it_in_a_part_of_the_time_of_the_whole(smollm2_gguf):
    def cpu_s(reader):
        command = [*COMMAND, str(smollm2_gguf), "Count to ten thousand.", "--ignore-eos", "-n", "100"]
        script = f'"$@" | {reader} > /dev/null; echo "${{PIPESTATUS[0]}}"'
        before = ended_cpu_s()
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": PATIENCE_S}
        done = subprocess.run(["bash", "-c", script, "bash", *command], **options)
        return ended_cpu_s() - before, done.stdout.decode(), done.stderr

    whole_s, *whole = cpu_s("cat")
    cut_s, *cut = cpu_s("head -c 10")
    assert (whole, cut) == (["0\n", b""], ["141\n", b""])
    assert cut_s < 0.5 * whole_s  # most of it is to start and to load the model


@pytest_model
def test_ctrl_c_in_a_long_prompt_ends_it_soon(smollm2_gguf, tmp_path):
    (tmp_path / "prompt.txt").write_text("All work and no play makes Jack a dull boy. " * 700)
    with started("run", smollm2_gguf, "-f", tmp_path / "prompt.txt", "-c", 8192) as process:
        wait_for_cpu_s(process, 3)  # it starts in one
        process.send_signal(signal.SIGINT)
        assert cpu_s_to_the_end(process) < 3  # half of one on a quiet machine; the rest of the prompt takes sixty
        assert process.returncode == 130
        assert (process.stdout.read(), process.stderr.read()) == (b"\n", b"")


@pytest_model
def test_ctrl_c_keeps_the_part_of_the_answer(smollm2_gguf):
    with started("run", smollm2_gguf, "Tell a story.", "--ignore-eos") as process:
        beginning = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(PATIENCE_S) == 130
        assert len(beginning) == 10
        assert rest.endswith(b"\n")
        assert process.stderr.read() == b""


@pytest_model
def test_each_call_adds_a_turn_to_a_session_and_finds_the_kv_state_of_the_last(smollm2_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    monkeypatch.delenv("EDGEINFER_PREFIX_CACHE_SIZE")
    flags = ["--session", "sky", "--json", "--temp", 0, "-n", 8]
    first = json.loads(run(smollm2_gguf, QUESTION, *flags, "-s", "You are brief.").stdout)
    again = json.loads(run(smollm2_gguf, "And at night?", *flags[:3]).stdout)  # settings and system prompt are kept
    usage = first["usage"]
    assert again["usage"]["cached_tokens"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert again["usage"]["completion_tokens"] == 8
    saved = json.loads((tmp_path / "sessions" / "sky.json").read_text())
    assert [m["content"] for m in saved["messages"]] == [QUESTION, first["text"], "And at night?", again["text"]]
    assert (saved["system"], saved["settings"]) == ("You are brief.", {"temperature": 0.0, "max_tokens": 8})


@pytest_model
def test_a_full_context_drops_the_oldest_turns_only_when_asked(smollm2_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    flags = ["--session", "full", "-c", 256, "-n", 4, "--temp", 0]
    for _ in range(2):
        assert run(smollm2_gguf, "word " * 90, *flags).returncode == 0
    done = run(smollm2_gguf, "word " * 90, *flags)
    assert done.returncode == 6
    assert "context holds 256 (raise the context size (-c" in error_of(done)
    done = run(smollm2_gguf, "word " * 90, *flags, "--on-overflow", "truncate")
    assert done.returncode == 0
    assert b"note: the context is full: the 2 oldest turns (" in done.stderr  # a quarter of it is free again
    saved = json.loads((tmp_path / "sessions" / "full.json").read_text())
    assert (len(saved["messages"]), saved["dropped_messages"]) == (6, 4)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_when_nobody_reads_its_pipe(tiny_gguf, name):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    options = ("--raw", "a", "-n", 100000, "-c", 100001, "--ignore-eos", "--no-prefix-cache")
    with started("run", tiny_gguf, *options, stdout=writer) as process:
        poll = select.poll()
        poll.register(writer, select.POLLOUT)
        while poll.poll(0) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(getattr(signal, name))
        assert process.wait(PATIENCE_S) == {"SIGINT": 130, "SIGTERM": 143}[name]
    os.close(writer)
    os.close(reader)
