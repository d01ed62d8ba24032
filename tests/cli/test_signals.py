"""How a command ends when a signal, or the C library, ends it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from processes import PATIENCE_S, cpu_s_to_the_end, started, wait_for_cpu_s

from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_comes_while_c_calls_python_is_not_lost(name: str, code: int) -> None:
    """An exception cannot leave such a function: the interpreter would print it and go on."""
    script = f"""
import ctypes, signal, sys, time
from edgeinfer.cli import app
from edgeinfer.cli.interrupt import prepare_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def work(*args, **kwargs):
    ctypes.CFUNCTYPE(None)(lambda: (signal.raise_signal(signal.{name}), time.sleep(0)))()
    time.sleep(3600)
app.app = work
app.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no such children without fork")
def test_a_child_forked_while_a_signal_is_waited_for_holds_nothing_up() -> None:
    script = """
import os, signal, time
from edgeinfer.cli.interrupt import on_interrupt
with on_interrupt(print):
    child = os.fork()
    if child == 0:
        time.sleep(3600)
os.kill(child, signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=True)


@pytest.mark.parametrize(("pause_s", "code"), [(0.0, 0), (0.6, 130)])
def test_a_second_signal_ends_at_once_but_not_one_that_was_sent_twice(pause_s: float, code: int) -> None:
    """Wrappers send one to the process and then to its group."""
    script = f"""
import os, signal, time
from edgeinfer.cli.interrupt import on_interrupt
with on_interrupt(lambda number: None) as received:
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGINT)
        while len(received) < count:
            time.sleep(0.001)
        time.sleep({pause_s})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done.stderr


def test_a_signal_ends_a_program_whose_full_stderr_nobody_reads() -> None:
    """As a batch that shows how far it is."""
    script = """
import os, signal
from edgeinfer.cli.interrupt import on_interrupt
from edgeinfer.cli.progress import Meter
class Counts:
    completion_tokens = 1
with on_interrupt(lambda number: None):
    os.kill(os.getpid(), signal.SIGINT)
    meter = Meter(None, Counts())
    while True:
        meter.end()
"""
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", script], stderr=writer) as process:
        os.close(writer)
        try:
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()
            os.close(reader)


@pytest.mark.model
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_termination_keeps_the_part_of_the_answer(smollm2_gguf: Path, number: signal.Signals, code: int) -> None:
    with started("run", smollm2_gguf, "Tell a story.", "--ignore-eos") as process:
        assert process.stdout is not None
        beginning = process.stdout.read(10)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(PATIENCE_S) == code
        assert len(beginning) == 10


@pytest.mark.model
@pytest.mark.parametrize("after_cpu_s", [1.5, 4.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_ends_at_once_and_its_document_is_valid(
    smollm2_gguf: Path, number: signal.Signals, after_cpu_s: float
) -> None:
    with started("bench", smollm2_gguf, "-p", "4096", "-n", "0", "-o", "json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        wait_for_cpu_s(process, after_cpu_s)
        process.send_signal(number)
        assert cpu_s_to_the_end(process) < 2  # the passes would take a hundred
        assert process.returncode == 128 + number
        document = json.loads(first + process.stdout.read())
    assert document[-1]["error"]["code"] == "interrupted"


@pytest.mark.model
def test_kill_9_in_an_answer_keeps_the_conversation_before_it(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    command = [sys.executable, "-m", "edgeinfer", "run", str(smollm2_gguf), "--session", "s", "-n", "4"]
    session = tmp_path / "sessions" / "s.json"

    def say(text: str) -> int:
        return subprocess.run(
            [*command, text], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        ).returncode

    assert say("My name is Anna.") == 0
    before = session.read_bytes()
    with started("run", smollm2_gguf, "--session", "s", "Tell a story.", "--ignore-eos") as process:
        assert process.stdout is not None
        assert len(process.stdout.read(10)) == 10
        process.kill()
        process.stdout.read()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert session.read_bytes() == before
    assert say("What is my name?") == 0, "neither the session's lock nor the prefix cache is in its way"
    assert len(json.loads(session.read_bytes())["messages"]) == 4


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a token that stands twice in its vocabulary, over which the C library ends the process."""
    folder = tmp_path_factory.mktemp("hopeless")
    convert(write_checkpoint(folder / "model"), folder / "m.gguf", ConvertOptions(type="Q8_0"))
    length, raw = struct.pack("<Q", 1), (folder / "m.gguf").read_bytes()
    raw = raw.replace(length + b"a", length + b"b", 1)
    (folder / "m.gguf").write_bytes(raw)
    return folder / "m.gguf"


@pytest.mark.parametrize("arguments", [["run", "--json", "hi"], ["bench", "-p", "9", "-n", "0", "-o", "json"]])
def test_an_assertion_of_the_library_is_one_line_and_a_document(hopeless: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "edgeinfer", arguments[0], str(hopeless), *arguments[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 4
    assert json.loads(done.stdout)
    assert len(done.stderr.splitlines()) == 1
    assert "GGML_ASSERT" in done.stderr
