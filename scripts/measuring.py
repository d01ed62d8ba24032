"""Runs commands side by side and measures them: wall time, peak memory, medians with their range.

Imports nothing large: a child's peak memory begins with what its parent had resident.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.cli import console
from edgeinfer.errors import ResourceError

MAXRSS_UNIT_NBYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Run:
    """What one or several commands, one after the other, took."""

    seconds: float
    peak_rss_bytes: int
    stdout: bytes


@dataclass(frozen=True, slots=True)
class Figure:
    """A median with its range."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def text(self, unit: str, digits: int = 2) -> str:
        """`1.23 s (1.20 to 1.31)`, or without the range when there is a single value."""
        text = f"{self.median:.{digits}f} {unit}"
        if len(self.values) > 1:
            text += f" ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"
        return text


def run_commands(*commands: Sequence[str | Path]) -> Run:
    """Run commands one after the other; raises ResourceError with the end of its output when one fails."""
    runs = [_run_command([str(part) for part in command]) for command in commands]
    return Run(sum(r.seconds for r in runs), max(r.peak_rss_bytes for r in runs), runs[-1].stdout)


def _run_command(command: list[str]) -> Run:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise ResourceError(f"{' '.join(command)}: exit code {child.returncode}", _tail(err.read()))
        return Run(seconds, usage.ru_maxrss * MAXRSS_UNIT_NBYTES, out.read())


def _tail(raw: bytes) -> str:
    return " ".join(raw.decode("utf-8", "replace").split())[-300:]


def alternate(sides: dict[str, Callable[[], Run]], repetitions: int) -> dict[str, list[Run]]:
    """A B, B A, A B … after a round that is not counted: it fills the page cache for every side alike.

    Whatever drifts in the machine, or is left behind by the side before, meets each side alike.
    """
    for side in sides.values():
        side()
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(repetitions):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            runs[name].append(side())
            console.note(f"  {number + 1}/{repetitions} {name}: {runs[name][-1].seconds:.2f} s")
    return runs


def seconds(runs: list[Run]) -> Figure:
    """The wall times."""
    return Figure(tuple(run.seconds for run in runs))


def peak_mb(runs: list[Run]) -> Figure:
    """The peaks in megabytes."""
    return Figure(tuple(run.peak_rss_bytes / 1e6 for run in runs))
