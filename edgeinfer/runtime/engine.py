"""The one engine: many requests, ragged batches, one forward pass a step.

Knows tokens and nothing of text. Works on any `types.Backend`; every answer is the same whether its request runs alone
or with others, at once or in between, cold or over tokens that somebody computed before.

The scheduler decides whose tokens run, the residency keeps what the KV cache holds; here it is done. A request's row of
a step may hold more tokens than one: what is known is committed, and whatever else the cache then holds of the sequence
is cut off by `Residency.cut`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgeinfer.cache.radix import common_length
from edgeinfer.errors import ContextOverflowError, UsageError
from edgeinfer.runtime.request import Generation
from edgeinfer.runtime.residency import Residency
from edgeinfer.runtime.swap import Swap
from edgeinfer.scheduling.policy import MIN_SHARED_TOKENS, Limits, Pace
from edgeinfer.scheduling.scheduler import Cached, Scheduler
from edgeinfer.types import (
    Backend,
    FinishReason,
    Logits,
    PrefixCache,
    Refusal,
    Request,
    Row,
    SamplerFactory,
    TokenEvent,
)


class Engine:
    """Requests in, token events out. One thread calls it; only `interrupt` may come from another."""

    def __init__(
        self,
        backend: Backend,
        make_sampler: SamplerFactory,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        limits: Limits | None = None,
        max_request_tokens: int | None = None,
    ) -> None:
        self._backend = backend
        self._make_sampler = make_sampler
        self._clock = clock
        self._max_tokens = min(backend.n_ctx, max_request_tokens or backend.n_ctx)
        self._residency = Residency(backend, prefix_cache)
        self.pace = Pace()
        self._swap = Swap(self._residency, self.pace, clock)
        self._scheduler: Scheduler[Generation] = Scheduler(_clamp(limits, backend), self.pace)
        self._new_answers: list[Generation] = []
        self._interrupted = False
        self._interrupt_lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def limits(self) -> Limits:
        """What the scheduler may do on this backend."""
        return self._scheduler.limits

    def submit(self, request: Request) -> Generation:
        """Queue a request; its events carry its `id`, the result keeps what it costs.

        Raises ContextOverflowError when prompt and one token do not fit, UsageError when there is nothing to do,
        OverloadError when too many requests wait.
        """
        n_prompt = len(request.tokens)
        if n_prompt == 0:
            raise UsageError("the prompt is empty", "give at least one token")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}", "ask for at least one token")
        if n_prompt >= self._max_tokens:
            raise ContextOverflowError(
                f"the prompt has {n_prompt} tokens, the context holds {self._max_tokens}",
                f"raise the context size (-c {n_prompt + 256} or more) or shorten the prompt",
            )
        sampler = self._make_sampler(request.params)
        tokens: list[int] = request.tokens.tolist()
        for token in tokens:
            sampler.accept(token)
        now_s = self._clock()
        generation = Generation(
            request=request,
            sampler=sampler,
            tokens=tokens,
            prompt_tokens=n_prompt,
            max_tokens=request.max_tokens,
            arrived_s=now_s,
            priority=request.priority,
            deadline_s=None if request.deadline_ms is None else now_s + request.deadline_ms / 1e3,
        )
        if not self.has_work:
            self._clear_interrupt()  # an interrupt of something that had already ended is void
        self._scheduler.enqueue(generation)
        return generation

    def cancel(self, request_id: int) -> None:
        """Forget a request; what it computed stays for others to reuse. Unknown ids are ignored."""
        for generation in [*self._scheduler.running, *self._scheduler.waiting]:
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
        while self._new_answers:  # now that their first tokens have been shown
            self._remember(self._new_answers.pop())
        started_s = self._clock()
        if self._scheduler.waiting:
            self._admit(started_s)
        planned = self._plan(started_s)
        if not planned:
            return []
        rows = [_row(generation, length) for generation, length in planned]
        n_tokens = sum(length for _, length in planned)
        self._residency.reserve(n_tokens)
        result = self._backend.forward(rows)
        if result is Refusal.ABORTED:
            for generation, _ in planned:
                assert generation.seq_id is not None
                generation.n_computed = self._residency.cut(generation.seq_id, generation.n_computed)
            return self._finish_all_interrupted()
        if isinstance(result, Refusal):
            return self._shrink(n_tokens)
        n_decoding = sum(length == 1 for _, length in planned)
        self.pace.observe_step(n_decoding, n_tokens - n_decoding, self._clock() - started_s)
        return self._commit(planned, result)

    def _plan(self, now_s: float) -> list[tuple[Generation, int]]:
        """Whose tokens run now. Where the running requests have no room to grow, the least important one gives way."""
        scheduler = self._scheduler
        while scheduler.lacks_room(self._residency.n_free):
            self._preempt(scheduler.victim(now_s))
        return scheduler.rows(now_s, self._residency.n_free)

    def _commit(self, planned: list[tuple[Generation, int]], logits: Logits) -> list[TokenEvent]:
        """Note what is resident now, and choose a token wherever the known ones are all computed."""
        events = []
        index = 0
        for generation, length in planned:
            start = generation.n_computed
            assert generation.seq_id is not None
            self._residency.computed(generation.seq_id, generation.tokens[start : start + length])
            generation.n_computed = start + length
            if generation.remaining == 0:
                events.append(self._sample(generation, logits, index))
                index += 1
        return events

    def _sample(self, generation: Generation, logits: Logits, index: int) -> TokenEvent:
        if generation.prefilled_s is None:
            generation.prefilled_s = self._clock()
        request = generation.request
        token = generation.sampler.sample(logits[index])
        if generation.first_token_s is None:
            generation.first_token_s = self._clock()
            self._new_answers.append(generation)
        generation.sampler.accept(token)
        generation.tokens.append(token)
        reason: FinishReason | None = None
        if token in request.end_tokens:
            reason = "stop"
        elif generation.n_answered >= request.max_tokens or len(generation.tokens) > self._max_tokens:
            reason = "length"
        if reason:
            self._finish(generation, reason)
        return TokenEvent(request.id, (token,), finish_reason=reason)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        generation.finished_s = self._clock()
        self._swap.drop(generation)
        self._scheduler.forget(generation)
        if reason != "interrupted":
            self.pace.observe_answer(generation.n_answered)
        if generation.seq_id is not None:
            self._remember(generation)
            if generation.request.keep_answer:
                self._residency.remember(generation.seq_id, generation.tokens[: generation.n_computed])
            self._residency.release(generation.seq_id)
            generation.seq_id = None

    def _remember(self, generation: Generation) -> None:
        """Let the prefix cache have the prompt, once, as far as it is computed."""
        if generation.seq_id is not None and not generation.remembered:
            generation.remembered = True
            self._residency.remember(generation.seq_id, generation.request.tokens[: generation.n_computed])

    def _finish_all_interrupted(self) -> list[TokenEvent]:
        self._clear_interrupt()
        unfinished = [*self._scheduler.running, *self._scheduler.waiting]
        for generation in unfinished:
            self._finish(generation, "interrupted")
        return [TokenEvent(g.request.id, (), finish_reason="interrupted") for g in unfinished]

    def _clear_interrupt(self) -> None:
        with self._interrupt_lock:
            self._interrupted = False
            self._backend.clear_abort()

    def _admit(self, now_s: float) -> None:
        """Give waiting requests a sequence, as long as the scheduler lets one in."""
        scheduler, residency = self._scheduler, self._residency
        lowest = scheduler.outranked(now_s)
        if lowest is not None:
            self._preempt(lowest)
        # For all at once: who is let in changes little of it, and it takes a while for many long prompts.
        resident = {id(g): residency.resident(g.tokens) for g in scheduler.waiting} if scheduler.has_place else {}

        def cached(generation: Generation) -> Cached:
            return self._cached(generation, resident[id(generation)])

        while residency.has_sequence:
            generation = scheduler.choose(now_s, cached, residency.n_free)
            if generation is None:
                return
            scheduler.start(generation)
            generation.seq_id, generation.n_computed = residency.open(generation.tokens)
            self._swap.restore(generation)
            if generation.cached_tokens is None:
                generation.cached_tokens = generation.n_computed

    def _cached(self, generation: Generation, resident: int) -> Cached:
        """What a waiting request will find, now and when those that are being prefilled are done."""
        tokens, coming = generation.tokens, resident
        next_ones = tokens[resident : resident + MIN_SHARED_TOKENS]
        if self._residency.shares:
            for other in self._scheduler.running:
                # The whole is compared only where it goes on the same way: there may be many, and long ones.
                if other.remaining > 1 and other.tokens[resident : resident + MIN_SHARED_TOKENS] == next_ones:
                    coming = max(coming, common_length(other.tokens, tokens, 0, len(tokens) - 1))
        return Cached(resident, coming)

    def _preempt(self, generation: Generation) -> None:
        """A running request waits again."""
        assert generation.seq_id is not None
        self._swap.save(generation)
        self._residency.release(generation.seq_id)
        generation.seq_id, generation.n_computed = None, 0
        self._scheduler.suspend(generation)

    def _shrink(self, n_tokens: int) -> list[TokenEvent]:
        """The backend has less room than was counted: from now on that is counted, and the next step fits into it.

        A request that is alone and finds no room has filled the context: it ends there.
        """
        self._residency.refused(n_tokens)
        if len(self._scheduler.running) > 1 or self._residency.n_free > 0:
            return []
        (generation,) = self._scheduler.running
        self._finish(generation, "length")
        return [TokenEvent(generation.request.id, (), finish_reason="length")]


def _row(generation: Generation, length: int) -> Row:
    """The next `length` tokens; logits where the known ones end, for there the next one is chosen."""
    start = generation.n_computed
    tokens = np.array(generation.tokens[start : start + length], np.int32)
    assert generation.seq_id is not None
    return Row(generation.seq_id, tokens, start, length - (length == generation.remaining))


def _clamp(limits: Limits | None, backend: Backend) -> Limits:
    """The limits on this backend: no more requests than sequences, no more tokens than a pass takes."""
    limits = limits or Limits(max_running=backend.capabilities.max_sequences)
    max_step_tokens = min(limits.max_step_tokens, backend.max_batch_tokens)
    max_running = min(limits.max_running, backend.capabilities.max_sequences, max_step_tokens)
    return replace(limits, max_running=max_running, max_step_tokens=max_step_tokens)
