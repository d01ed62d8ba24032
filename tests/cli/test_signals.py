"""How a command ends when a signal, or the C library, ends it."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions


def _default_signals() -> None:
    """Whoever runs the tests may ignore signals (nohup does), and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def _started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeinfer", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_default_signals,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


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
    time.sleep(30)
app.app = work
app.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=20, check=False)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.model
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_termination_keeps_the_part_of_the_answer(smollm2_gguf: Path, number: signal.Signals, code: int) -> None:
    with _started("run", smollm2_gguf, "Tell a story.", "--ignore-eos") as process:
        assert process.stdout is not None
        beginning = process.stdout.read(10)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=30) == code
        assert len(beginning) == 10


@pytest.mark.model
@pytest.mark.parametrize("delay_s", [1.0, 2.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_ends_at_once_and_its_document_is_valid(
    smollm2_gguf: Path, number: signal.Signals, delay_s: float
) -> None:
    with _started("bench", smollm2_gguf, "-p", "4096", "-n", "0", "-o", "json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(number)
        sent = time.monotonic()
        document = json.loads(first + process.stdout.read())
        assert process.wait(timeout=30) == 128 + number
        assert time.monotonic() - sent < 2
    assert document[-1]["error"]["code"] == "interrupted"


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
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 4
    assert json.loads(done.stdout)
    assert len(done.stderr.splitlines()) == 1
    assert "GGML_ASSERT" in done.stderr
