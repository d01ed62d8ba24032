"""A suffix automaton that grows with a text: what followed the longest part of its end that stood in it before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_REFRESHED = 16
"""How many ever shorter ends of the text note what follows them now; the rest keep what they had."""


class SuffixAutomaton:
    """A state stands for the parts of the text that end at the same places; the work per token is O(1) amortized.

    A state's link leads to its longest suffix that also stands elsewhere. So the link of the state of the whole text is
    the longest end of it that occurred before.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._recent = [-1]
        """The token that followed a state's parts when they were seen last."""
        self._whole = 0

    @property
    def matched(self) -> int:
        """How many of the last tokens stood in the text before, together."""
        link = self._links[self._whole]
        return self._lengths[link] if link > 0 else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        following, links, lengths, recent = self._next, self._links, self._lengths, self._recent
        whole = self._whole
        for token in tokens:
            new = len(links)
            following.append({})
            lengths.append(lengths[whole] + 1)
            links.append(0)
            recent.append(-1)
            state = whole
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                recent[state] = token
                state = links[state]
            if state >= 0:
                links[new] = self._target(state, token)
                for _ in range(_REFRESHED):
                    if state < 0:
                        break
                    recent[state] = token
                    state = links[state]
            whole = new
        self._whole = whole

    def _target(self, state: int, token: int) -> int:
        """Where `token` leads from a state, as a state whose longest part is just one longer; split off if need be."""
        following, links, lengths = self._next, self._links, self._lengths
        target = following[state][token]
        if lengths[target] == lengths[state] + 1:
            return target
        split = len(links)
        following.append(following[target].copy())
        lengths.append(lengths[state] + 1)
        links.append(links[target])
        self._recent.append(self._recent[target])
        links[target] = split
        while state >= 0 and following[state].get(token) == target:
            following[state][token] = split
            state = links[state]
        return split

    def continuation(self, max_tokens: int) -> Iterator[tuple[int, int, bool]]:
        """What is likely to follow the text, token by token: each with the length of the match that it goes on from,
        and whether nothing else has ever followed that."""
        following, links, lengths, recent = self._next, self._links, self._lengths, self._recent
        state = links[self._whole]
        matched = self.matched
        for _ in range(max_tokens):
            while (
                state > 0 and not following[state]
            ):  # the end of the text itself: go on from where its end stood before
                state = links[state]
                matched = min(matched, lengths[state])
            if state <= 0 or matched == 0:
                return
            token = recent[state]
            yield token, matched, len(following[state]) == 1
            state = following[state][token]
            matched += 1
