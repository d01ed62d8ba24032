"""Commands that run while a test goes on, measured in processor time: wall time says nothing on a loaded machine."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_S = 300
"""How long a command that is bound to end, or to say something, may take before a test calls it stuck."""

SLOW_PATIENCE_S = 3600
"""The same where a test is marked as slow."""

Process = TypeVar("Process", bound="subprocess.Popen[Any]")


def do_not_ignore_signals() -> None:
    """Whoever runs the tests may ignore signals (nohup does), and commands inherit that, but no handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def watched(process: Process) -> Iterator[Process]:
    """The process, killed at the end of the block, however that comes, and when it does not: reading from it ends."""
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.daemon = True
    timer.start()
    with process:
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


@contextmanager
def started(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`edgeinfer` with these arguments, killed at the end of the block if it still runs."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "edgeinfer", *map(str, arguments)], **{**pipes, **options})
    with watched(process):
        yield process


def wait_for_cpu_s(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the process has taken so much processor time, or is at its end."""
    deadline_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and _cpu_s(process.pid) < seconds:
        assert time.monotonic() < deadline_s, "the process waits for something"
        time.sleep(0.05)


def cpu_s_to_the_end(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of the process; the processor time of all its threads that it takes from now on."""
    so_far, reaped = _cpu_s(process.pid), ended_cpu_s()
    process.wait(PATIENCE_S)
    return ended_cpu_s() - reaped - so_far


def ended_cpu_s() -> float:
    """Processor time of all children that have ended and been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _cpu_s(pid: int) -> float:
    """Processor time that a process has taken, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
