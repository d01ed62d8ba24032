"""The one generation loop: many requests, ragged batches, one forward pass a step.

Knows tokens and nothing of text. Works on any `types.Backend`; every answer is the same whether its request
runs alone or with others, cold or over tokens that an earlier one left in the KV cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.errors import ContextOverflowError, EdgeinferError, UsageError
from edgeinfer.runtime.request import Generation, Slot, Step
from edgeinfer.types import (
    Backend,
    FinishReason,
    KVOp,
    Logits,
    PrefixCache,
    Refusal,
    Request,
    Row,
    SamplerFactory,
    TokenEvent,
)

PREFILL_CHUNK = 512
"""Prompt tokens of one request per step: what an abort can lose, and what others wait for."""


def next_rows(active: Sequence[Generation], budget: int, chunk: int = PREFILL_CHUNK) -> Step:
    """Which tokens to run now: those that decode first, then prompts in the order of their arrival.

    At most `budget` tokens in all and `chunk` of one request. A row asks for logits where the request's known
    tokens end, for there the next one is chosen.
    """
    rows: list[Row] = []
    chosen: list[Generation] = []
    for generation in sorted(active, key=lambda g: g.remaining > 1) if len(active) > 1 else active:
        length = min(generation.remaining, chunk, budget)
        if length == 0:
            break
        budget -= length
        start = generation.n_computed
        assert generation.seq_id is not None
        tokens = np.array(generation.tokens[start : start + length], np.int32)
        rows.append(Row(generation.seq_id, tokens, start, length - (length == generation.remaining)))
        chosen.append(generation)
    return Step(tuple(rows), tuple(chosen))


class Engine:
    """Requests in, token events out. One thread calls it; only `interrupt` may come from another."""

    def __init__(
        self,
        backend: Backend,
        make_sampler: SamplerFactory,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._make_sampler = make_sampler
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._slots = [Slot(seq_id) for seq_id in range(backend.capabilities.max_sequences)]
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []  # in the order of admission
        self._steps = 0
        self._interrupted = False
        self._interrupt_lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._active or self._waiting)

    def submit(self, request: Request) -> Generation:
        """Queue a request; its events carry its `id`, the result keeps what it costs.

        Raises ContextOverflowError when prompt and one token do not fit, UsageError when there is nothing to do.
        """
        n_prompt, n_ctx = len(request.tokens), self._backend.n_ctx
        if n_prompt == 0:
            raise UsageError("the prompt is empty", "give at least one token")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}", "ask for at least one token")
        if n_prompt >= n_ctx:
            raise ContextOverflowError(
                f"the prompt has {n_prompt} tokens, the context holds {n_ctx}",
                f"raise the context size (-c {n_prompt + 256} or more) or shorten the prompt",
            )
        sampler = self._make_sampler(request.params)
        tokens: list[int] = request.tokens.tolist()
        for token in tokens:
            sampler.accept(token)
        generation = Generation(request, sampler, tokens, submitted_s=self._clock())
        if not self.has_work:
            self._clear_interrupt()  # an interrupt of something that had already ended is void
        self._waiting.append(generation)
        return generation

    def cancel(self, request_id: int) -> None:
        """Forget a request; what it computed stays for others to reuse. Unknown ids are ignored."""
        for generation in [*self._active, *self._waiting]:
            if generation.request.id == request_id:
                self._finish(generation, "interrupted")

    def interrupt(self) -> None:
        """Make the running or next step end soon and finish every request as `interrupted`; from any thread."""
        with self._interrupt_lock:
            self._interrupted = True
            self._backend.abort()

    def step(self) -> list[TokenEvent]:
        """One forward pass over whatever is due; returns what it brought, possibly nothing."""
        if self._interrupted:
            return self._finish_all_interrupted()
        self._steps += 1
        for generation in self._active:
            if generation.first_token_s is not None:
                self._remember(generation)  # now that its first token has been shown
        self._admit()
        step = next_rows(self._active, self._backend.max_batch_tokens)
        if not step.rows:
            return []
        result = self._backend.forward(step.rows)
        if result is Refusal.ABORTED:
            for row in step.rows:
                self._trim(self._slots[row.seq_id], row.pos0)
            return self._finish_all_interrupted()
        if isinstance(result, Refusal):
            return self._make_room()
        return self._commit(step, result)

    def _commit(self, step: Step, logits: Logits) -> list[TokenEvent]:
        """Note what is resident now, and choose a token wherever the known ones are all computed."""
        events = []
        index = 0
        for row, generation in zip(step.rows, step.generations, strict=True):
            slot = self._slots[row.seq_id]
            slot.tokens.extend(row.tokens.tolist())
            slot.last_used = self._steps
            generation.n_computed += len(row.tokens)
            if row.n_logits:
                events.append(self._sample(generation, logits, index))
                index += row.n_logits
        return events

    def _sample(self, generation: Generation, logits: Logits, index: int) -> TokenEvent:
        if generation.prefilled_s is None:
            generation.prefilled_s = self._clock()
        request = generation.request
        token = generation.sampler.sample(logits[index])
        if generation.first_token_s is None:
            generation.first_token_s = self._clock()
        generation.sampler.accept(token)
        generation.tokens.append(token)
        reason: FinishReason | None = None
        if token in request.end_tokens:
            reason = "stop"
        elif generation.completion_tokens >= request.max_tokens or len(generation.tokens) > self._backend.n_ctx:
            reason = "length"
        if reason:
            self._finish(generation, reason)
        return TokenEvent(request.id, (token,), finish_reason=reason)

    def _remember(self, generation: Generation) -> None:
        """Keep the state of the prompt, as far as it is computed."""
        if self._prefix_cache is None or generation.seq_id is None or generation.remembered:
            return
        generation.remembered = True
        tokens = generation.request.tokens[: generation.n_computed]
        self._prefix_cache.remember(self._backend, generation.seq_id, tokens)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self._remember(generation)
        generation.finish_reason = reason
        generation.finished_s = self._clock()
        if generation.seq_id is None:
            self._waiting.remove(generation)
        else:
            self._active.remove(generation)
            self._slots[generation.seq_id].owner = None
            generation.seq_id = None

    def _finish_all_interrupted(self) -> list[TokenEvent]:
        self._clear_interrupt()
        unfinished = [*self._active, *self._waiting]
        for generation in unfinished:
            self._finish(generation, "interrupted")
        return [TokenEvent(g.request.id, (), finish_reason="interrupted") for g in unfinished]

    def _clear_interrupt(self) -> None:
        with self._interrupt_lock:
            self._interrupted = False
            self._backend.clear_abort()

    def _admit(self) -> None:
        """Give waiting requests a sequence, first come first served, while the KV cache has room for their tokens."""
        while self._waiting:
            free = [slot for slot in self._slots if slot.owner is None]
            needed = len(self._waiting[0].tokens) + 1
            held = sum(len(g.tokens) for g in self._active)
            if not free or (self._active and held + needed > self._backend.n_ctx):
                return
            generation = self._waiting.popleft()
            slot = max(free, key=lambda s: (self._reusable(s, generation), not s.tokens, -s.last_used))
            reused = self._trim(slot, self._reusable(slot, generation))
            if not generation.admitted:
                reused = self._restore(slot, generation)
                generation.cached_tokens, generation.admitted = reused, True
            generation.n_computed, generation.seq_id = reused, slot.seq_id
            slot.owner = generation
            self._active.append(generation)

    def _restore(self, slot: Slot, generation: Generation) -> int:
        """Append what the prefix cache has of the prompt, its last token excepted; returns what the slot then holds."""
        length = len(slot.tokens)
        wanted = generation.request.tokens[:-1]
        if self._prefix_cache is not None and self._prefix_cache.match(wanted) > length:
            length = self._prefix_cache.restore(self._backend, slot.seq_id, wanted, length)
            slot.tokens = wanted[:length].tolist()
        return length

    def _reusable(self, slot: Slot, generation: Generation) -> int:
        """How many of the request's tokens the slot holds in front; the last is always run again, for its logits."""
        most = min(len(slot.tokens), len(generation.tokens) - 1)
        same = np.array(slot.tokens[:most]) == np.array(generation.tokens[:most])
        length = most if same.all() else int(same.argmin())
        if not self._backend.capabilities.can_trim and length < len(slot.tokens):
            return 0
        return length

    def _trim(self, slot: Slot, length: int) -> int:
        """Forget what the slot holds from position `length` on; where that cannot be, all of it. Returns what is left.

        Removes without looking at `slot.tokens`: after an abort the backend may hold more than was committed.
        """
        if length and not self._backend.apply(KVOp("remove", slot.seq_id, slot.seq_id, length, -1)):
            length = 0
        if length == 0 and not self._backend.apply(KVOp("remove", slot.seq_id, slot.seq_id, 0, -1)):
            raise EdgeinferError(f"the backend does not forget sequence {slot.seq_id}")
        del slot.tokens[length:]
        return length

    def _make_room(self) -> list[TokenEvent]:
        """The KV cache is full: drop what only waits to be reused, else put the youngest request back into the queue.

        A request that is alone and finds no room has filled the context: it ends there.
        """
        idle = [slot for slot in self._slots if slot.owner is None and slot.tokens]
        if idle:
            self._trim(min(idle, key=lambda s: s.last_used), 0)
            return []
        youngest = self._active[-1]
        assert youngest.seq_id is not None
        slot = self._slots[youngest.seq_id]
        if len(self._active) == 1:
            self._finish(youngest, "length")
            self._trim(slot, 0)
            return [TokenEvent(youngest.request.id, (), finish_reason="length")]
        self._trim(slot, 0)
        self._active.pop()
        slot.owner = None
        youngest.seq_id, youngest.n_computed = None, 0
        self._waiting.appendleft(youngest)
        return []
