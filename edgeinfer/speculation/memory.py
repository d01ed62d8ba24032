"""Drafts from earlier answers of the same model: what followed when their words stood there.

A script that asks the same of one document after the other gets answers of one form. Only answers are kept, as tokens,
the newest ones, so many that their automaton is small.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from edgeinfer.speculation.automaton import SuffixAutomaton
from edgeinfer.speculation.draft import Proposal
from edgeinfer.speculation.lookup import Lookup, grade_of
from edgeinfer.types import Request

MAX_TOKENS = 8192
"""Of all answers that are kept, with one more for each."""
_LEAST_TOKENS = 8
"""Of an answer that is worth keeping."""
_BETWEEN = -1
"""Stands between answers; no token."""
_READ_AT_ONCE = 256
"""Tokens that are taken in while a step waits: they take about a millisecond."""
_DOUBT = 0.85
"""Other answers say less than the text itself."""


class Memory:
    """`draft.Source` over what was answered before, here (`answers`, the newest last) or since."""

    name = "memory"
    is_free = True

    def __init__(self, answers: Sequence[Sequence[int]] = ()) -> None:
        self.answers: list[tuple[int, ...]] = []
        """The newest last."""
        self.has_changed = False
        self.automaton = SuffixAutomaton()
        self._n_kept = self._n_read = 0
        self._unread: list[int] = []
        for answer in answers:
            self.add(answer)
        self._begin()
        self.has_changed = False

    def expected(self, grade: int) -> float:
        """A little less than what the same match in the text itself is worth."""
        return _DOUBT * Lookup().expected(grade)

    def open(self, request: Request) -> MemoryDraft:
        """Follow a request's answer."""
        return MemoryDraft(self, len(request.tokens), request.end_tokens)

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer, as the newest one."""
        tokens = tuple(answer[-MAX_TOKENS // 2 :])
        if len(tokens) < _LEAST_TOKENS or (self.answers and self.answers[-1] == tokens):
            return
        self.has_changed = True
        if tokens in self.answers:
            self.answers.remove(tokens)
        else:
            self._n_kept += len(tokens) + 1
            self._unread += (*tokens, _BETWEEN)
        self.answers.append(tokens)
        while self._n_kept > MAX_TOKENS:
            self._n_kept -= len(self.answers.pop(0)) + 1
        if self._n_read + len(self._unread) > 2 * MAX_TOKENS:  # most of it is of answers that are not kept
            self._begin()

    def _begin(self) -> None:
        """Take in all answers anew, the newest first: it is the likeliest to help."""
        self.automaton, self._n_read = SuffixAutomaton(), 0
        self._unread = [token for kept in reversed(self.answers) for token in (*kept, _BETWEEN)]

    def read_on(self) -> None:
        """Take in what was added, a part at a time: a step waits for it."""
        if self._unread:
            part, self._unread = self._unread[:_READ_AT_ONCE], self._unread[_READ_AT_ONCE:]
            self._n_read += len(part)
            self.automaton.extend(part)


class MemoryDraft:
    """`draft.Draft` of one answer."""

    def __init__(self, memory: Memory, n_prompt: int, end_tokens: Container[int]) -> None:
        self._memory = memory
        self._n_prompt = n_prompt
        self._end_tokens = end_tokens
        self._answer: list[int] = []
        self._automaton = memory.automaton
        self._state = self._matched = 0

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has grown; what is not the prompt counts."""
        new = tokens[self._n_prompt :]
        self._n_prompt = max(0, self._n_prompt - len(tokens))
        self._answer += new
        if self._automaton is not self._memory.automaton:
            self._automaton, self._state, self._matched = self._memory.automaton, 0, 0
        for token in new:
            self._state, self._matched = self._automaton.after(self._state, self._matched, token)

    def propose(self, max_tokens: int) -> Proposal | None:
        """What followed the longest end of the answer that stands in another; at most twice as long as that."""
        self._memory.read_on()
        if not self._matched or self._automaton is not self._memory.automaton:
            return None
        found = []
        for guess in self._automaton.going_on(self._state, self._matched, min(max_tokens, 2 * self._matched + 1)):
            if guess.token < 0:
                break
            found.append(guess)
            if guess.token in self._end_tokens:
                break
        if not found:
            return None
        return Proposal(Memory.name, tuple(guess.token for guess in found), tuple(map(grade_of, found)))

    def close(self) -> None:
        """The answer is one of the earlier ones now."""
        self._memory.add(self._answer)
