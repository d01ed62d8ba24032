"""What a person is told while a batch runs."""

import io
import sys
from types import SimpleNamespace

import pytest

from edgeinfer.cli.progress import Meter, rows


class Stderr(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def meter(monkeypatch, total_nbytes, *, is_terminal=False):
    shown, counts, clock = Stderr(is_terminal), SimpleNamespace(completion_tokens=0), SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(sys, "stderr", shown)
    return Meter(total_nbytes, counts, lambda: clock.now_s), shown, counts, clock


def test_tokens_per_second_and_the_time_left_leave_out_what_was_skipped(monkeypatch):
    made, shown, counts, clock = meter(monkeypatch, 10_000)
    clock.now_s += 5
    made.count(4_000, failed=False)  # most of it was there already
    clock.now_s += 10
    made.count(5_000, failed=True)
    counts.completion_tokens = 300
    made.show()
    assert shown.getvalue() == "2 rows (1 failed), 300 tokens, 20.0 tokens/s, 50 s left\n"


def test_it_does_not_talk_all_the_time_and_ends_with_the_sum(monkeypatch):
    made, shown, counts, clock = meter(monkeypatch, None)
    for _ in range(3900):
        clock.now_s += 1
        made.show()
    assert shown.getvalue().count("\n") == 390
    assert "left" not in shown.getvalue()
    counts.completion_tokens = 39
    made.end()
    assert shown.getvalue().splitlines()[-1] == "0 rows, 39 tokens, 0.0 tokens/s in 1:05:00"


@pytest.mark.parametrize(("is_terminal", "starts"), [(True, "\r"), (False, "0 rows")])
def test_only_a_terminal_gets_a_line_that_changes(monkeypatch, is_terminal, starts):
    made, shown, _, clock = meter(monkeypatch, 10, is_terminal=is_terminal)
    clock.now_s += 60
    made.show()
    assert shown.getvalue().startswith(starts)
    assert shown.getvalue().endswith("\n") != is_terminal
    assert "\x1b" not in shown.getvalue()


def test_a_line_that_changes_does_not_wrap(monkeypatch):
    made, shown, counts, clock = meter(monkeypatch, 10_000, is_terminal=True)
    monkeypatch.setattr("edgeinfer.cli.progress._width", lambda: 20)
    for _ in range(3):
        clock.now_s += 5
        counts.completion_tokens += 1_000_000
        made.count(100, failed=False)
        made.show()
    assert [len(line) for line in shown.getvalue().split("\r")] == [0, 20, 20, 20]


def test_one_is_no_plural():
    assert [rows(n) for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
