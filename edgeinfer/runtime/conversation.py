"""A conversation as data: who said what, and how much of it the model is shown. Knows neither tokens nor files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.errors import UsageError

Said = dict[str, str]
"""`role` (user or assistant), `content`, and where there was some `reasoning`."""


@dataclass(slots=True)
class Conversation:
    """All that was said, the system prompt apart. The model does not see the first `n_dropped` messages any more."""

    system: str = ""
    messages: list[Said] = field(default_factory=list)
    n_dropped: int = 0

    def shown(self, start: int | None = None) -> list[Said]:
        """What the template is given: the system prompt and the messages from `start` on, or all that are not dropped.

        Reasoning goes under the names that templates know; most leave it out, as the models' makers want it.
        """
        messages = self.messages[self.n_dropped if start is None else start :]
        return [*([{"role": "system", "content": self.system}] if self.system else []), *map(_for_template, messages)]

    def turns(self) -> list[int]:
        """Where the turns begin that the model still sees: at what the user says."""
        return [i for i, m in enumerate(self.messages) if i >= self.n_dropped and m["role"] == "user"]

    def undo(self) -> str:
        """Take the last turn back; returns what was asked. Raises UsageError when there is none."""
        start = self._last_turn()
        if start is None:
            raise UsageError("there is no turn to take back", "say something first")
        question = self.messages[start]["content"]
        del self.messages[start:]
        if self.n_dropped >= len(self.messages):  # what is left fitted once: show the last of it again
            self.n_dropped = self._last_turn() or 0
        return question

    def _last_turn(self) -> int | None:
        return next((i for i in range(len(self.messages) - 1, -1, -1) if self.messages[i]["role"] == "user"), None)


def oldest_kept(starts: list[int], count: Callable[[int], int], most_tokens: int) -> int:
    """The first of the turns that begin at `starts` from which on the conversation has at most `most_tokens` tokens.

    `count` tells how many it has from a message on. The last turn stays in any case.
    """
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if count(starts[middle]) <= most_tokens:
            high = middle
        else:
            low = middle + 1
    return starts[low]


def _for_template(message: Said) -> Said:
    if "reasoning" not in message:
        return dict(message)
    reasoning = message["reasoning"]
    return {
        "role": message["role"],
        "content": message["content"],
        "reasoning_content": reasoning,
        "thinking": reasoning,
    }
