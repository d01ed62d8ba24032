"""What a model writes to itself before it answers, told apart from the answer.

Only at the beginning of an answer, where models put it: an answer that quotes such a tag further on is not cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Opening and closing as the models' templates have them.
_BLOCKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>",
}
# gpt-oss also says where its answer begins; that is neither.
_HEADERS = ("<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>")
_OPENINGS = (*_BLOCKS, *_HEADERS)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of what a model said."""

    text: str
    is_reasoning: bool


class ReasoningSplitter:
    """Takes text as it streams, gives its parts without the tags as soon as they are certain.

    `closing` is the tag that is awaited when the prompt itself has opened a block. The parts put together do not depend
    on how the text is cut.
    """

    def __init__(self, closing: str | None = None) -> None:
        self._closing = closing
        self._undecided = True  # whether a block may still begin
        self._held = ""
        self._strips = closing is not None  # whether the white space that comes next belongs to a tag

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that have become certain."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """No more will come; returns what was held back."""
        held, self._held = self._held, ""
        if self._strips:
            held = held.lstrip()
        return [Part(held, self._closing is not None)] if held else []

    def _advance(self, parts: list[Part]) -> bool:
        """Take a step; False when more text is needed or none is left."""
        if self._closing is not None:
            return self._inside(self._closing, parts)
        if self._undecided:
            return self._at_a_beginning()
        parts.append(Part(self._held, False))
        self._held = ""
        return False

    def _at_a_beginning(self) -> bool:
        said = self._held.lstrip()
        for opening in _OPENINGS:
            if said.startswith(opening):
                self._held = said[len(opening) :]
                self._closing = _BLOCKS.get(opening)
                self._strips = True
                return True
        if any(opening.startswith(said) for opening in _OPENINGS):
            return False
        if self._strips:
            self._held, self._strips = said, False
        self._undecided = False
        return True

    def _inside(self, closing: str, parts: list[Part]) -> bool:
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held
        before, found, after = self._held.partition(closing)
        if found:
            thought = before.rstrip()
            self._held, self._closing, self._strips = after, None, True
        else:
            # White space before a closing tag is not part of the thought either, so it waits as well.
            thought = before[: len(before) - _beginning_of(closing, before)].rstrip()
            self._held = before[len(thought) :]
        if thought:
            parts.append(Part(thought, True))
        return bool(found)


def closing_of_open_block(prompt_end: str) -> str | None:
    """The closing tag of the block that a prompt's last characters open, None where they open none."""
    end = prompt_end.rstrip()
    return next((closing for opening, closing in _BLOCKS.items() if end.endswith(opening.rstrip())), None)


def split_reasoning(text: str, closing: str | None) -> tuple[str | None, str]:
    """The reasoning at the beginning of an answer, None where there is none, and the rest."""
    splitter = ReasoningSplitter(closing)
    return joined([*splitter.feed(text), *splitter.finish()])


def joined(parts: Iterable[Part]) -> tuple[str | None, str]:
    """Reasoning, None where there is none, and answer, from their parts."""
    parts = list(parts)
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    return reasoning or None, "".join(part.text for part in parts if not part.is_reasoning)


def _beginning_of(closing: str, text: str) -> int:
    """The length of the longest end of `text` that the closing tag begins with."""
    return next((n for n in range(min(len(closing) - 1, len(text)), 0, -1) if text.endswith(closing[:n])), 0)
