"""The chat as a person at a terminal sees it. The answers are scripted (chat_program.py), but for the last tests."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from terminals import Terminal

PROGRAM = str(Path(__file__).with_name("chat_program.py"))
Start = Callable[..., Terminal]


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Begins a chat of these answers; what it keeps is kept from one to the next within a test."""
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    with ExitStack() as started:

        def start(
            *answers: str, columns: int = 80, rows: int = 24, environment: object = None, **script: object
        ) -> Terminal:
            document = {"answers": answers, "hold": str(tmp_path / "go-on"), **script}
            (tmp_path / "script.json").write_text(json.dumps(document))
            command = [sys.executable, PROGRAM, str(tmp_path / "script.json")]
            return started.enter_context(Terminal(command, environment, columns, rows))  # type: ignore[arg-type]

        yield start


def test_an_answer_is_shown_as_markdown_and_the_status_line_says_what_it_took(chat: Start) -> None:
    terminal = chat("# Title\n\nSome **bold** and `code`.\n\n- one\n- two\n\n```python\nx = 1\n```\n\nThe end.")
    terminal.say("hello")
    terminal.expect("The end.")
    terminal.expect_prompt()
    lines = terminal.lines
    assert "Title" in lines
    assert "Some bold and code." in lines
    assert not any("**" in line or "```" in line for line in lines)
    terminal.expect("tokens of context left")
    assert "cached" in terminal.text
    terminal.type("\x04")
    assert terminal.end() == 0


def test_history_is_kept_for_its_owner_and_for_the_next_chat(chat: Start, tmp_path: Path) -> None:
    first = chat("yes")
    first.say("is it remembered?")
    first.expect("yes")
    first.say("/bye")
    assert first.end() == 0
    history = tmp_path / "home" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    second = chat("still yes")
    second.expect_prompt()
    second.type("\x1b[A\x1b[A")  # the last thing typed was /bye
    second.expect(">>> is it remembered?")
    second.type("\r")
    second.expect("still yes")


def test_several_lines_by_quotes_and_by_paste(chat: Start) -> None:
    terminal = chat("first answer", "second answer")
    terminal.say('"""one')
    terminal.expect("...")
    terminal.type('two\rthree"""\r')
    terminal.expect("first answer")
    terminal.expect_prompt()
    terminal.type("\x1b[200~four\rfive\rsix\x1b[201~")
    terminal.expect("six")
    terminal.type("\r")
    terminal.expect("second answer")
    terminal.say("/show messages")
    terminal.expect("user: one\ntwo\nthree")
    terminal.expect("user: four\nfive\nsix")


@pytest.mark.parametrize("question", ["tell me", "an endless prompt endless"])
def test_ctrl_c_stops_an_answer_or_its_prompt_and_keeps_what_was_said(chat: Start, question: str) -> None:
    terminal = chat("Once upon\x01 a time", "again")
    terminal.say(question)
    if question == "tell me":
        terminal.expect("Once upon")
    else:
        terminal.expect_answer()
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.say("/show messages")
    terminal.expect("assistant: Once upon\n" if question == "tell me" else "assistant:")
    terminal.say("go on")
    terminal.expect("again")


def test_ctrl_c_twice_leaves_and_anything_else_in_between_does_not(chat: Start) -> None:
    terminal = chat("fine")
    terminal.expect_prompt()
    terminal.type("\x03")
    terminal.expect("Ctrl-C again")
    terminal.say("hello")
    terminal.expect("fine")
    terminal.expect_prompt()
    terminal.type("\x03")
    terminal.wait(lambda: terminal.text.count("Ctrl-C again") == 2, "the second warning")
    terminal.expect_prompt()
    terminal.type("\x03")
    assert terminal.end() == 0


def test_ctrl_c_that_ends_an_answer_counts_as_the_first(chat: Start) -> None:
    terminal = chat("Once\x01 more")
    terminal.say("tell me")
    terminal.expect("Once")
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.expect_prompt()
    terminal.type("\x03")
    assert terminal.end() == 0


def test_what_is_typed_during_an_answer_does_not_show_in_it_and_is_read_afterwards(chat: Start, tmp_path: Path) -> None:
    terminal = chat("Once\x01 upon a time", "next answer")
    terminal.say("tell me")
    terminal.expect("Once")
    terminal.type("typed early\r")
    (tmp_path / "go-on").touch()
    terminal.expect("Once upon a time")
    terminal.expect("next answer")
    assert terminal.text.count("typed early") == 1


def test_undo_regen_clear_and_system(chat: Start) -> None:
    terminal = chat("first", "second", "third", "fourth")
    terminal.say("/system be brief")
    terminal.say("one")
    terminal.expect("first")
    terminal.say("/regen")
    terminal.expect("second")
    terminal.say("two")
    terminal.expect("third")
    terminal.say("/undo")
    terminal.expect("taken back: two")
    terminal.say("/show messages")
    terminal.expect("user: one\nassistant: second\n>>>")
    terminal.say("/show system")
    terminal.expect("be brief\n>>>")
    terminal.say("/clear")
    terminal.expect("(a new conversation)")
    terminal.say("/show messages")
    terminal.expect("(nothing was said yet)")
    terminal.say("/undo")
    terminal.expect("error: there is no turn to take back")


def test_settings(chat: Start) -> None:
    terminal = chat("abcdefghij", "abcdefghij")
    terminal.say("/set max_tokens 3")
    terminal.say("hi")
    terminal.expect("abc\n(cut:")
    terminal.say("/set temp hot")
    terminal.expect("error: temperature is 'hot'")
    terminal.say("/set nonsense 1")
    terminal.expect("error: 'nonsense' is no setting")
    terminal.say("/set max_tokens none")
    terminal.say("hi")
    terminal.expect("abcdefghij")
    terminal.say("/show")
    terminal.expect("max_tokens        none")
    terminal.say("/nonsense")
    terminal.expect("error: /nonsense is not a command")
    terminal.expect_prompt()
    terminal.type("/re\t")
    terminal.expect(">>> /regen")


def test_an_editor_writes_a_message(chat: Start, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "from the %s" "$(cat "$1") editor" > "$1"\n')
    editor.chmod(0o700)
    terminal = chat("read it", environment={"EDITOR": str(editor), "VISUAL": ""})
    terminal.say("/edit great")
    terminal.expect("read it")
    terminal.say("/show messages")
    terminal.expect("user: from the great editor")


def test_reasoning_is_dimmed_or_folded_and_can_be_shown(chat: Start) -> None:
    answer = "<think>\nfirst this, then that\n</think>\n\nThe answer."
    terminal = chat(answer, answer)
    terminal.say("why?")
    terminal.expect("The answer.")
    assert b"\x1b[2mf" in terminal.output
    assert "<think>" not in terminal.text
    terminal.say("/set reasoning fold")
    terminal.say("/clear")
    terminal.say("why?")
    terminal.expect("(4 words of reasoning: /show reasoning)\n\nThe answer.")
    terminal.say("/show reasoning")
    terminal.wait(lambda: terminal.text.count("first this, then that") == 2, "the reasoning again")
    terminal.say("/show messages")
    terminal.expect("assistant: The answer.")


@pytest.mark.parametrize(("columns", "environment"), [(30, {}), (80, {"NO_COLOR": "1"}), (80, {"TERM": "dumb"})])
def test_narrow_dumb_and_colourless_terminals_get_plain_text(
    chat: Start, columns: int, environment: dict[str, str]
) -> None:
    terminal = chat("Some **bold** text.\n\n\x1b[31mred\x07", columns=columns, environment=environment)
    if "TERM" in environment:
        terminal.expect(">>>")
        terminal.type("hello\r")
    else:
        terminal.say("hello")
    terminal.expect("Some **bold** text.")
    terminal.expect("[31mred")
    assert b"\x1b[31m" not in terminal.output
    if columns == 80:
        terminal.expect("red\ufffd")
        assert b"\x1b[1m" not in terminal.output
    if "TERM" in environment:
        assert b"\x1b" not in terminal.output


def test_a_resize_in_the_middle_of_an_answer_and_at_the_prompt(chat: Start, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(60))
    terminal = chat(f"{words[:200]}\x01{words[200:]}", "after")
    terminal.say("many words")
    terminal.expect("word20")
    terminal.resize(50, 20)
    (tmp_path / "go-on").touch()
    terminal.expect("word59")
    terminal.expect_prompt()
    shown = terminal.text.replace("\n", " ")
    assert words in " ".join(shown.split())
    terminal.resize(100, 30)
    terminal.say("and now?")
    terminal.expect("after")


def test_the_oldest_turns_are_dropped_and_it_says_so(chat: Start) -> None:
    answers = ["a" * 110] * 4
    terminal = chat(*answers, n_ctx=300, on_overflow="truncate")
    for turn in ("one", "two", "three"):
        terminal.say(turn)
        terminal.expect_prompt()
    terminal.expect("note: the context is full: the oldest turn (")
    terminal.say("/show messages")
    terminal.expect("user: one")


def test_a_full_context_is_an_error_with_both_numbers_and_the_chat_goes_on(chat: Start) -> None:
    terminal = chat("fine", n_ctx=100)
    terminal.say("x" * 200)
    terminal.expect("tokens, the context holds 100")
    terminal.expect("(raise the context size (-c")
    terminal.say("short")
    terminal.expect("fine")


def test_save_load_and_a_session_of_another_process(chat: Start, tmp_path: Path) -> None:
    first = chat("first answer")
    first.say("one")
    first.expect("first answer")
    first.say("/save ideas")
    first.expect("kept as session ideas")
    second = chat("second answer")
    second.say("/load ideas")
    second.expect("session ideas is in use by another process")
    first.say("/bye")
    assert first.end() == 0
    path = tmp_path / "home" / "sessions" / "ideas.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    second.say("/load ideas")
    second.expect("going on after 1 turn")
    second.say("two")
    second.expect("second answer")
    second.say("/load nothing")
    second.expect("error: there is no session nothing")
    second.say("/bye")
    assert second.end() == 0
    messages = json.loads(path.read_text())["messages"]
    assert [m["content"] for m in messages] == ["one", "first answer", "two", "second answer"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_a_termination_leaves_the_terminal_as_it_was(chat: Start, number: signal.Signals, where: str) -> None:
    terminal = chat("Once\x01 upon")
    if where == "answer":
        terminal.say("tell me")
        terminal.expect("Once")
    else:
        terminal.expect_prompt()
        terminal.type("half a line")
        terminal.expect("half a line")
    os.kill(terminal.pid, number)
    assert terminal.end() == 128 + number
    assert terminal.modes() == terminal.first_modes
    assert terminal.output.rindex(b"\x1b[?2004l") > terminal.output.rindex(b"\x1b[?2004h")


def test_leaving_leaves_the_terminal_as_it_was(chat: Start) -> None:
    terminal = chat()
    terminal.say("/bye")
    assert terminal.end() == 0
    assert terminal.modes() == terminal.first_modes


@pytest.mark.model
def test_a_terminal_without_a_prompt_is_a_chat(smollm2_gguf: Path) -> None:
    command = [sys.executable, "-m", "edgeinfer", "run", str(smollm2_gguf), "--temp", "0", "-n", "8", "-c", "8192"]
    with Terminal(command) as terminal:
        terminal.say("/help")
        terminal.expect("/regen")
        terminal.say("Hello")
        terminal.expect("8 tokens, ")
        terminal.expect_prompt()
        terminal.type("\x1b[200~" + "All work and no play makes Jack a dull boy. " * 600 + "\x1b[201~")
        terminal.expect("dull boy.")
        terminal.type("\r")
        terminal.expect_answer()
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
