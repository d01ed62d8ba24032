"""Markdown on a screen while it streams: always what the text so far looks like, and never an empty moment."""

import os

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.cli.markdown import MarkdownStream, rendered, split_complete

TEXT = """# A heading

A paragraph with **bold**, *italic* and `code`, long enough that it has to be wrapped on a narrow screen.
It goes on here.

1. first

2. second
   with more

```python
def f(x):

    return x + 1
```

> a quote

| a | b |
|---|---|
| 1 | 2 |

The end 漢字 é."""


class Screen:
    """Takes what is written, and looks after every write."""

    def __init__(self, columns, rows):
        self.size = os.terminal_size((columns, rows))
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self.screen.set_mode(pyte.modes.LNM)  # as a terminal's driver makes of a line end
        self.stream = pyte.Stream(self.screen)
        self.seen = []

    def write(self, text):
        self.stream.feed(text)
        self.seen.append(self.lines())

    def lines(self):
        above = ["".join(line[x].data for x in range(self.size.columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in (*above, *self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def plain(text, width):
    """The lines of a whole text, without escape codes."""
    screen = pyte.Screen(width + 1, 200)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed("\n".join(rendered(text, width)))
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


def shown(screen, pieces):
    clock = iter(range(10**9))  # a second passes with every look, so that every piece is shown
    view = MarkdownStream(screen.write, lambda: screen.size, lambda: next(clock))
    for piece in pieces:
        view.feed(piece)
    view.end()


@settings(max_examples=20)
@pytest.mark.parametrize("columns", [41, 60, 100])
@pytest.mark.parametrize("rows", [10, 50])
@given(data=st.data())
def test_the_end_is_what_the_whole_text_looks_like(columns, rows, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(TEXT)), max_size=12)))
    pieces = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    screen = Screen(columns, rows)
    shown(screen, pieces)
    found = [line for line in screen.lines() if line]
    assert found == [line for line in plain(TEXT, columns - 1) if line]


def test_what_was_shown_never_goes_away_for_a_moment():
    screen = Screen(60, 40)
    shown(screen, TEXT)
    words = 0
    for lines in screen.seen:
        now = sum(len(line.split()) for line in lines)
        assert now >= words - 4  # a mark, or a table's beginning, is another number of words when it is complete
        words = max(words, now)
    assert all("A heading" in lines[0] for lines in screen.seen[12:])


def test_complete_blocks_are_not_written_again():
    screen = Screen(60, 40)
    written = []
    screen.write = written.append
    shown(screen, TEXT)
    assert sum("A heading" in text for text in written) <= 2
    assert not any("\x1b[2J" in text or "\x1b[H" in text for text in written)


def test_another_width_in_the_middle_loses_nothing():
    screen = Screen(60, 40)
    view = MarkdownStream(screen.write, lambda: screen.size, iter(range(10**9)).__next__)
    view.feed("one two three ")
    screen.size = os.terminal_size((50, 40))
    view.feed("four")
    view.end()
    assert screen.lines()[-1] == "one two three four"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("a\n\nb", "a\n\n"),
        ("a\n\n", ""),
        ("a\nb", ""),
        ("- a\n\n  more\n\n- b", "- a\n\n  more\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nb", ""),
        ("~~~\n```\n\n~~~\n\nx", "~~~\n```\n\n~~~\n\n"),
    ],
)
def test_where_a_text_can_be_cut(text, done):
    assert split_complete(text) == (done, text[len(done) :])
