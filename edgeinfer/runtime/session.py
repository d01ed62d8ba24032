"""A chat: turns of one conversation through one engine, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgeinfer.errors import ContextOverflowError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import AnswerStream, said
from edgeinfer.runtime.conversation import Conversation, Said, oldest_kept
from edgeinfer.runtime.prompt import chat_text, tokenize_chat
from edgeinfer.runtime.template import ChatTemplate
from edgeinfer.types import Constraint, Tokens, Vocabulary

OnOverflow = Literal["error", "truncate"]

_LEAST_ROOM = 1 / 8
"""Of the context, for an answer, before turns are dropped; more than `max_tokens` it need not be."""
_ROOM_AFTER_DROPPING = 1 / 4
"""So that not every turn drops another one, and changes where the conversation begins."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How a turn is answered; None for `max_tokens` is no limit."""

    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    keep_answer: bool = False
    """Whether the KV state of the answer is kept on disk, for another process to go on from."""
    constraint: Constraint | None = None
    """What the answer has to match; it then has no reasoning before it."""
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a chat is resumed from. `tokens` stand for `text`, the beginning of what the model was given last."""

    system: str = ""
    messages: tuple[Said, ...] = ()
    n_dropped: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """What no longer fitted into the context."""

    n_turns: int
    n_tokens: int


class ChatSession:
    """The conversation so far, and the tokens that stand for it.

    The model's own tokens are kept for its answers: tokenizing their text again can give others, and then everything
    after them would have to be computed anew.
    """

    def __init__(
        self,
        start: Callable[[Tokens, TurnSettings], AnswerStream],
        vocabulary: Vocabulary,
        template: ChatTemplate,
        *,
        n_ctx: int,
        settings: TurnSettings,
        system: str | None = None,
        on_overflow: OnOverflow = "error",
    ) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._template = template
        self.n_ctx = n_ctx
        self.settings = settings
        """Of the next turn; they can be set."""
        self._on_overflow = on_overflow
        self.dropped: Dropped | None = None
        """What the last turn dropped from what the model sees, None if nothing."""
        self._conversation = Conversation(system or "")
        self._stream: AnswerStream | None = None
        self._prompt_text = ""
        self._prompt_tokens = np.empty(0, np.int32)
        self._history_text = ""
        self._history_tokens = np.empty(0, np.int32)

    @property
    def messages(self) -> list[Said]:
        """Role and content of every turn after the system prompt, an answer that is still streaming left out."""
        self._settle()
        return self._conversation.shown(0)

    @property
    def system(self) -> str:
        """The system prompt, "" for none; it can be set and counts from the next turn on."""
        return self._conversation.system

    @system.setter
    def system(self, text: str) -> None:
        self._settle()
        self._conversation.system = text

    def clear(self, system: str | None = None) -> None:
        """Begin anew, with another system prompt if one is given ("" for none)."""
        self._settle()
        self._conversation = Conversation(self.system if system is None else system)

    def state(self) -> SessionState:
        """What `resume` goes on from, also in another process."""
        self._settle()
        said_so_far = self._conversation
        return SessionState(
            said_so_far.system,
            tuple(dict(message) for message in said_so_far.messages),
            said_so_far.n_dropped,
            self._history_text,
            tuple(self._history_tokens.tolist()) if self._history_text else (),
        )

    def resume(self, state: SessionState) -> None:
        """Go on where a state was taken. Its tokens count if they spell its text, whichever model they come from."""
        self._settle()
        messages = [dict(message) for message in state.messages]
        self._conversation = Conversation(state.system, messages, state.n_dropped)
        is_own = self._spells(state)
        self._history_text = state.text if is_own else ""
        self._history_tokens = np.array(state.tokens if is_own else (), np.int32)

    def ask(self, text: str) -> AnswerStream:
        """Say something; iterate over the result for the answer. An answer that is cut short counts as far as it got.

        Raises ContextOverflowError when the conversation no longer fits; the turn is then not part of it.
        """
        self._settle()
        self._conversation.messages.append({"role": "user", "content": text})
        try:
            return self._answer()
        except BaseException:
            self._conversation.messages.pop()
            raise

    def regenerate(self) -> AnswerStream:
        """Answer the last turn again. Raises UsageError when there is none."""
        self._settle()
        messages = self._conversation.messages
        if not messages or messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to give again", "ask something first")
        last = messages.pop()
        try:
            return self._answer()
        except BaseException:
            messages.append(last)
            raise

    def undo(self) -> str:
        """Take the last turn back; returns what was asked. Raises UsageError when there is none."""
        self._settle()
        return self._conversation.undo()

    def _answer(self) -> AnswerStream:
        text, tokens = self._fitting_prompt()
        self._stream = self._start(tokens, self.settings)
        self._prompt_text, self._prompt_tokens = text, tokens
        return self._stream

    def _fitting_prompt(self) -> tuple[str, Tokens]:
        """The prompt, after dropping the oldest turns where they no longer fit and may be dropped."""
        self.dropped = None
        conversation = self._conversation
        prompt = self._prompt(conversation.n_dropped)
        n_before, starts = len(prompt[1]), conversation.turns()
        if self._on_overflow == "truncate" and len(starts) > 1 and n_before > self.n_ctx - self._needed_room():
            most = int(self.n_ctx * (1 - _ROOM_AFTER_DROPPING))
            start = oldest_kept(starts, lambda start: len(self._prompt(start)[1]), most)
            prompt = self._prompt(start)
            if len(prompt[1]) < self.n_ctx:  # else the last message alone is too long, and nothing is gained
                conversation.n_dropped = start
                self.dropped = Dropped(starts.index(start), n_before - len(prompt[1]))
        if len(prompt[1]) >= self.n_ctx:
            raise self._overflow(n_before, alone=len(starts) == 1 or self._on_overflow == "truncate")
        return prompt

    def _needed_room(self) -> int:
        room = max(1, int(self.n_ctx * _LEAST_ROOM))
        return room if self.settings.max_tokens is None else min(room, self.settings.max_tokens)

    def _overflow(self, n_tokens: int, *, alone: bool) -> ContextOverflowError:
        what = "the message with its system prompt" if alone else "the conversation"
        ways = "shorten the message" if alone else "drop its oldest turns (--on-overflow truncate), or begin anew"
        return ContextOverflowError(
            f"{what} has {n_tokens} tokens, the context holds {self.n_ctx}",
            f"raise the context size (-c {n_tokens + 256} or more), or {ways}",
        )

    def _prompt(self, start: int) -> tuple[str, Tokens]:
        """Text and tokens of the conversation from a message on, with the tokens that are known already."""
        text, marks = chat_text(self._vocabulary, self._template, self._conversation.shown(start))
        for known, tokens in (
            (self._history_text, self._history_tokens),
            (self._prompt_text, self._prompt_tokens),  # an answer is given again
        ):
            if known and text.startswith(known):
                rest = tokenize_chat(self._vocabulary, text[len(known) :], marks, continues=True)
                return text, np.concatenate([tokens, rest])
        return text, tokenize_chat(self._vocabulary, text, marks)

    def _settle(self) -> None:
        """Make the answer that was streamed part of the conversation."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.cancel()  # if nobody read it to its end
        answer = stream.answer
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning is not None:
            message["reasoning"] = answer.reasoning
        self._conversation.messages.append(message)
        tokens = [t for t in stream.tokens if t not in self._vocabulary.end_tokens]
        if b"".join(said(self._vocabulary, t) for t in tokens) == answer.text.encode():
            self._history_text = self._prompt_text + answer.text
            self._history_tokens = np.concatenate([self._prompt_tokens, np.array(tokens, np.int32)])
        else:  # a stop string cut it, half a character was left, or its reasoning is not said again
            self._history_text = ""

    def _spells(self, state: SessionState) -> bool:
        """Whether the tokens of a state are tokens of this vocabulary and put together are its text."""
        vocabulary = self._vocabulary
        tokens = list(state.tokens)
        if not tokens or not all(0 <= token < vocabulary.n_tokens for token in tokens):
            return False
        if tokens[0] == vocabulary.bos and not state.text.startswith(vocabulary.text(tokens[0])):
            del tokens[0]  # added, not written by the template
        spelled = b"".join(vocabulary.piece(token, special=True) for token in tokens).decode("utf-8", "replace")
        return spelled.removeprefix(" ") == state.text.removeprefix(" ")  # some vocabularies put a space in front
