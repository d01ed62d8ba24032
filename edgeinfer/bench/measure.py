"""llama-bench's two tests over any `types.Backend`: run a prompt (pp), generate tokens one by one (tg).

The method is llama-bench's (tools/llama-bench/llama-bench.cpp), so that figures compare: random tokens, the
begin-of-sequence token first if the model wants it, a warm-up, a forgotten KV cache before every repetition, the
tokens that give the test its depth untimed, no sampling and no text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from edgeinfer.errors import EdgeinferError
from edgeinfer.types import Backend, KVOp, Refusal, Row, Tokens


@dataclass(frozen=True, slots=True)
class Trial:
    """`n_prompt` tokens at once, then `n_gen` one by one, after `n_depth` that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def n_tokens(self) -> int:
        """How many tokens are timed."""
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        """The context that holds the test exactly."""
        return self.n_tokens + self.n_depth

    @property
    def label(self) -> str:
        """`pp512`, `tg128 @ d4096`, as llama-bench writes it."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True, slots=True)
class Samples:
    """Nanoseconds: of each repetition, of each repetition's prompt, of every generated token after the first."""

    total_ns: tuple[int, ...]
    prompt_ns: tuple[int, ...]
    between_tokens_ns: tuple[int, ...]

    @classmethod
    def joined(cls, parts: Iterable[Samples]) -> Samples:
        """One after the other."""
        found = list(parts)
        return cls(
            tuple(ns for part in found for ns in part.total_ns),
            tuple(ns for part in found for ns in part.prompt_ns),
            tuple(ns for part in found for ns in part.between_tokens_ns),
        )


class Runner:
    """Runs tests on sequence 0 of a backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos: int | None,
        seed: int = 0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._backend = backend
        self._bos = bos
        self._rng = np.random.default_rng(seed)
        self._clock_ns = clock_ns

    def run(self, test: Trial, repetitions: int) -> Samples:
        """Warm up, then measure. Raises EdgeinferError when the backend refuses a pass."""
        return Samples.joined(itertools.islice(self.repeat(test), repetitions))

    def repeat(self, test: Trial) -> Iterator[Samples]:
        """Warm up, then measure once for every item that is asked for."""
        self._forget(0)
        if test.n_prompt:
            self._prompt(test.n_prompt, 0)
        if test.n_gen:
            self._generate(1, test.n_prompt)
        depth = self._forget(0)
        while True:
            if depth < test.n_depth:
                self._prompt(test.n_depth - depth, depth)
            started = self._clock_ns()
            prompts = []
            if test.n_prompt:
                self._prompt(test.n_prompt, test.n_depth)
                prompts.append(self._clock_ns() - started)
            ticks = self._generate(test.n_gen, test.n_depth + test.n_prompt)
            total = (ticks[-1] if ticks else self._clock_ns()) - started
            depth = self._forget(test.n_depth)
            yield Samples((total,), tuple(prompts), tuple(np.diff(ticks).tolist()))

    def _prompt(self, n_tokens: int, pos0: int) -> None:
        tokens = self._rng.integers(0, self._backend.n_vocab, n_tokens, np.int32)
        if pos0 == 0 and self._bos is not None:
            tokens[0] = self._bos
        step = self._backend.max_batch_tokens
        for start in range(0, n_tokens, step):
            chunk = tokens[start : start + step]
            self._forward(chunk, pos0 + start, len(chunk) - 1)

    def _generate(self, n_tokens: int, pos0: int) -> list[int]:
        """When each token was done."""
        ticks = []
        tokens = self._rng.integers(0, self._backend.n_vocab, max(n_tokens, 1), np.int32)
        if pos0 == 0 and self._bos is not None:
            tokens[0] = self._bos
        for i in range(n_tokens):
            self._forward(tokens[i : i + 1], pos0 + i, 0)
            ticks.append(self._clock_ns())
        return ticks

    def _forward(self, tokens: Tokens, pos0: int, logits_from: int) -> None:
        logits = self._backend.forward((Row(0, tokens, pos0, logits_from),))
        if isinstance(logits, Refusal):
            raise EdgeinferError(f"the backend ran out: {logits.value}")

    def _forget(self, depth: int) -> int:
        """Empty the KV cache from `depth` on; returns how much is left, 0 where the memory cannot be trimmed."""
        if depth and self._backend.apply(KVOp("remove", 0, 0, depth, -1)):
            return depth
        if not self._backend.apply(KVOp("remove", 0, 0, 0, -1)):
            raise EdgeinferError("the backend does not forget a sequence")
        return 0
