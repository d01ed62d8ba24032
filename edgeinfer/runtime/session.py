"""A chat: turns of one conversation through one engine, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeinfer.errors import UsageError
from edgeinfer.runtime.answer import AnswerStream
from edgeinfer.runtime.prompt import chat_text, tokenize_chat
from edgeinfer.runtime.template import ChatTemplate
from edgeinfer.types import Tokens, Vocabulary


class ChatSession:
    """The conversation so far, and the tokens that stand for it.

    The model's own tokens are kept for its answers: tokenizing their text again can give others, and then everything
    after them would have to be computed anew.
    """

    def __init__(
        self,
        start: Callable[[Tokens], AnswerStream],
        vocabulary: Vocabulary,
        template: ChatTemplate,
        *,
        system: str | None = None,
    ) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._template = template
        self._system = system or ""
        self._messages: list[dict[str, str]] = []
        self._stream: AnswerStream | None = None
        self._prompt_text = ""
        self._prompt_tokens = np.empty(0, np.int32)
        self._history_text = ""
        self._history_tokens = np.empty(0, np.int32)
        self.clear()

    @property
    def messages(self) -> list[dict[str, str]]:
        """Role and content of every turn, an answer that is still streaming left out."""
        self._settle()
        return [dict(message) for message in self._messages]

    def clear(self, system: str | None = None) -> None:
        """Begin anew, with another system prompt if one is given ("" for none)."""
        self._stream = None
        if system is not None:
            self._system = system
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> AnswerStream:
        """Say something; iterate over the result for the answer. An answer that is cut short counts as far as it got.

        Raises ContextOverflowError when the conversation no longer fits; the turn is then not part of it.
        """
        self._settle()
        self._messages.append({"role": "user", "content": text})
        try:
            return self._answer()
        except BaseException:
            self._messages.pop()
            raise

    def regenerate(self) -> AnswerStream:
        """Answer the last turn again. Raises UsageError when there is none."""
        self._settle()
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to give again", "ask something first")
        self._messages.pop()
        return self._answer()

    def _answer(self) -> AnswerStream:
        text, marks = chat_text(self._vocabulary, self._template, self._messages)
        known = self._history_text
        if known and text.startswith(known):
            rest = tokenize_chat(self._vocabulary, text[len(known) :], marks, continues=True)
            tokens = np.concatenate([self._history_tokens, rest])
        else:
            tokens = tokenize_chat(self._vocabulary, text, marks)
        self._stream = self._start(tokens)
        self._prompt_text, self._prompt_tokens = text, tokens
        return self._stream

    def _settle(self) -> None:
        """Make the answer that was streamed part of the conversation."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.cancel()  # if nobody read it to its end
        text = stream.answer.text
        self._messages.append({"role": "assistant", "content": text})
        tokens = [t for t in stream.tokens if t not in self._vocabulary.end_tokens]
        said = b"".join(self._vocabulary.piece(t) for t in tokens)
        if said == text.encode():
            self._history_text = self._prompt_text + text
            self._history_tokens = np.concatenate([self._prompt_tokens, np.array(tokens, np.int32)])
        else:  # a stop string cut it, or half a character was left
            self._history_text = ""
