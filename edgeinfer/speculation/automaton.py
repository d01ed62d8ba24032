"""A suffix automaton that grows with a text: what followed the longest part of its end that stood in it before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COUNTED = 16
"""How many ever shorter ends of the text count what follows them now; in a text like aaaa there is one per token."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that is likely to be next."""

    token: int
    matched: int
    """The length of the match that it goes on from."""
    seen: int
    """How often the token has followed that before."""
    tries: int
    """And how often anything has."""


class SuffixAutomaton:
    """A state stands for the parts of the text that end at the same places; the work per token is O(1) amortized.

    A state's link leads to its longest suffix that also stands elsewhere. So the link of the state of the whole text is
    the longest end of it that occurred before.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._counts = [0]
        """How often a state's parts stand in the text."""
        self._likeliest = [-1]
        """The token that most often followed them, the later one of two."""
        self._whole = 0

    @property
    def matched(self) -> int:
        """How many of the last tokens stood in the text before, together."""
        link = self._links[self._whole]
        return self._lengths[link] if link > 0 else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        for token in tokens:
            before, self._whole = self._whole, self._append(token)
            self._count(before, token)

    def continuation(self, max_tokens: int) -> Iterator[Guess]:
        """What is likely to follow the text, token by token."""
        return self.going_on(self._links[self._whole], self.matched, max_tokens)

    def after(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow another text, token by token, from (0, 0) on: the state and the length of the longest end of it that
        stands in this one, once `token` has come to an end that has `matched` tokens and this state.
        """
        following, links, lengths = self._next, self._links, self._lengths
        while state > 0 and token not in following[state]:
            state = links[state]
            matched = min(matched, lengths[state])
        target = following[state].get(token)
        return (0, 0) if target is None else (target, matched + 1)

    def going_on(self, state: int, matched: int, max_tokens: int) -> Iterator[Guess]:
        """What is likely to follow a part of the text with this state, of which the last `matched` tokens count."""
        following, links, lengths, counts = self._next, self._links, self._lengths, self._counts
        for _ in range(max_tokens):
            while state > 0 and not following[state]:  # the end of the text: go on where its end stood before
                state = links[state]
                matched = min(matched, lengths[state])
            if state <= 0:
                return
            token = self._likeliest[state]
            target = following[state][token]
            # The state's own count may have the end of the text in it, which nothing has followed yet.
            seen = counts[target]
            yield Guess(token, matched, seen, seen if len(following[state]) == 1 else max(counts[state], seen + 1))
            state = target
            matched += 1

    def _append(self, token: int) -> int:
        """The state of the text with one more token."""
        following, links = self._next, self._links
        new = self._new({}, self._lengths[self._whole] + 1, 0)
        state = self._whole
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state >= 0:
            links[new] = self._target(state, token)
        return new

    def _target(self, state: int, token: int) -> int:
        """Where `token` leads from a state, as a state whose longest part is just one longer; split off if need be."""
        following, links, lengths = self._next, self._links, self._lengths
        target = following[state][token]
        if lengths[target] == lengths[state] + 1:
            return target
        split = self._new(following[target].copy(), lengths[state] + 1, links[target])
        self._counts[split] = self._counts[target]
        self._likeliest[split] = self._likeliest[target]
        links[target] = split
        while state >= 0 and following[state].get(token) == target:
            following[state][token] = split
            state = links[state]
        return split

    def _new(self, following: dict[int, int], length: int, link: int) -> int:
        self._next.append(following)
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(0)
        self._likeliest.append(-1)
        return len(self._links) - 1

    def _count(self, before: int, token: int) -> None:
        """The whole text and its ends stand here once more; `token` followed the ends of the text before."""
        following, links, counts, likeliest = self._next, self._links, self._counts, self._likeliest
        state = self._whole
        for _ in range(_COUNTED):
            if state <= 0:
                break
            counts[state] += 1
            state = links[state]
        state = before
        for _ in range(_COUNTED):
            if state < 0:
                break
            best = likeliest[state]
            if best != token and (best < 0 or counts[following[state][token]] >= counts[following[state][best]]):
                likeliest[state] = token
            state = links[state]
