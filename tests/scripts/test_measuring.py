"""The measuring itself: what a child took, in whose turn."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from measuring import Figure, Run, alternate, run_commands
from processes import PATIENCE_S
from toolbox import REPOSITORY

from edgeinfer.errors import ResourceError


def test_time_and_peak_are_the_childs() -> None:
    # From a small process: a child's peak begins with its parent's, and pytest's may be anything.
    child = "import time; x = b'x' * 200_000_000; time.sleep(0.2)"
    code = f"import sys, measuring; r = measuring.run_commands([sys.executable, '-c', {child!r}]); "
    code += "print(r.seconds, r.peak_rss_bytes)"
    path = os.pathsep.join(map(str, (REPOSITORY / "scripts", REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
    )
    seconds, peak_rss_bytes = map(float, done.stdout.split())
    assert seconds >= 0.2
    assert 200_000_000 < peak_rss_bytes < 300_000_000


def test_commands_one_after_the_other_add_up() -> None:
    done = run_commands(*[[sys.executable, "-c", f"import time; time.sleep(0.1); print({i})"] for i in range(2)])
    assert done.seconds >= 0.2
    assert done.stdout == b"1\n"


def test_a_failure_is_an_error_with_its_last_words() -> None:
    with pytest.raises(ResourceError, match="exit code 3") as caught:
        run_commands([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert "why" in caught.value.hint


def test_sides_take_turns_after_an_uncounted_round() -> None:
    calls: list[str] = []

    def side(name: str) -> Run:
        calls.append(name)
        return Run(float(len(calls)), 0, b"")

    runs = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, 2)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert [run.seconds for run in runs["a"]] == [3, 6]


def test_a_figure_is_a_median_with_its_range() -> None:
    assert Figure((3.0, 1.0, 2.0)).text("s") == "2.00 s (1.00 to 3.00)"
    assert Figure((1.5,)).text("MB", 0) == "2 MB"
