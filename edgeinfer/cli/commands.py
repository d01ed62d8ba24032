"""What can be typed in a chat, as data: messages, and commands that begin with a slash. Knows no terminal."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.cli.settings import NAMES

QUOTES = '"""'
HELP = {
    "/help": "show this",
    "/system [TEXT]": "go on with this system prompt (without TEXT: with none)",
    "/set NAME VALUE": "change a setting (VALUE none: take it back); /set reasoning show or fold",
    "/show [WHAT]": "settings, system, messages, or the reasoning of the last answer",
    "/regen": "answer the last message again",
    "/undo": "take the last message and its answer back",
    "/edit [TEXT]": "write the next message in $EDITOR",
    "/save NAME": "keep the conversation as a session, from here on after every answer",
    "/load NAME": "go on with a session",
    "/tokens": "what the conversation and the last answer took",
    "/clear": "begin anew",
    "/bye": "leave (so does Ctrl-D, or Ctrl-C twice)",
}
KEYS = f"""\
Ctrl-C stops an answer and keeps what was said. {QUOTES} begins and ends a message of
several lines; a paste may have them as well. Ctrl-X Ctrl-E opens the message in
$EDITOR. With a space in front, what begins with a slash is said."""
WORDS = tuple(usage.split()[0] for usage in HELP)
SHOWN = ("settings", "system", "messages", "reasoning")
_ARGUMENTS = {"/set": ("reasoning", *NAMES), "/show": SHOWN}


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what follows it."""

    word: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Something to say to the model."""

    text: str


def parse(typed: str) -> Command | Message | None:
    """What was typed; None for nothing."""
    text = typed.strip()
    if not text:
        return None
    if text.startswith(QUOTES):
        inner = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return Message(inner) if inner.strip() else None
    if not typed.startswith("/"):
        return Message(text)
    word, _, argument = text.partition(" ")
    return Command({"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(word, word), argument.strip())


def is_open(typed: str) -> bool:
    """Whether quotes have been opened and not closed, so that a line end does not end the message."""
    text = typed.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def completions(typed: str) -> list[tuple[str, int]]:
    """Words that can stand at the end of what was typed, each with how many characters of it are there already."""
    word, found, argument = typed.partition(" ")
    if not found:
        return [(w, len(word)) for w in WORDS if word.startswith("/") and w.startswith(word)]
    return [(a, len(argument)) for a in _ARGUMENTS.get(word, ()) if a.startswith(argument)]


def help_text() -> str:
    """What /help shows."""
    width = max(map(len, HELP))
    return "\n".join([*(f"{usage:{width}}  {about}" for usage, about in HELP.items()), KEYS])
