"""Settings that differ from module to module: `rank_pattern` and `alpha_pattern` of a PEFT adapter.

A key is a regular expression for the end of a module's path, and the first one that fits decides (peft:
get_pattern_key). Most keys are plain paths. The others come from a file that nobody vouches for, so that those are
refused which could take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_CHARS = 128
"""Of an expression, and of a module's path."""
MAX_TRIES = 20_000
"""Of all expressions on all modules; the worst take 3 ms each."""
_PLAIN = re.compile(r"[\w.]+")
_REPETITION = re.compile(r"(?<!\\)[*+?{]")
_EXPENSIVE = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
_MAX_REPETITIONS = 2


class ModulePatterns:
    """Values by patterns of module paths. Raises ValueError for patterns that are none, or too expensive."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = list(values.values())
        self._plain: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for i, pattern in enumerate(values):
            if _PLAIN.fullmatch(pattern):
                self._plain[pattern] = i
            else:
                self._expressions.append((i, _compiled(pattern)))
        self._n_tries = 0

    def get(self, module: str, default: Any) -> Any:
        """The value for the module with this path. Raises ValueError where that has been asked too often."""
        self._n_tries += len(self._expressions)
        if self._n_tries > MAX_TRIES:
            raise ValueError("too many regular expressions")
        parts = module.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        found = [self._plain[end] for end in ends if end in self._plain]
        found += [i for i, expression in self._expressions if expression.match(module)][:1]
        return self._values[min(found)] if found else default


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > MAX_CHARS or _EXPENSIVE.search(pattern) or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS:
        raise ValueError(f"{pattern[:80]!r} is too intricate a regular expression")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
