"""The one engine: many requests, ragged batches, one forward pass a step.

Knows tokens and nothing of text. Works on any `types.Backend`; every answer is the same whether its request runs alone
or with others, at once or in between, cold or over tokens that somebody computed before.

The scheduler decides whose tokens run, the residency keeps what the KV cache holds; here it is done. A request's row of
a step may hold a draft behind what is known of its text: logits are computed along it, the tokens that turn out right
are committed, and whatever else the cache then holds of the sequence is cut off by `Residency.cut`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from edgeinfer.cache.block import BLOCK_TOKENS
from edgeinfer.cache.radix import Match, common_length
from edgeinfer.errors import ContextOverflowError, EdgeinferError, UsageError
from edgeinfer.runtime.constrained import ConstrainedSampler
from edgeinfer.runtime.drafting import Drafting, Room
from edgeinfer.runtime.recording import RecordingSampler
from edgeinfer.runtime.request import Generation, Share
from edgeinfer.runtime.residency import Residency
from edgeinfer.runtime.swap import Swap
from edgeinfer.scheduling.policy import MIN_SHARED_TOKENS, Limits, Pace
from edgeinfer.scheduling.scheduler import Cached, Scheduler
from edgeinfer.speculation.accept import accepted
from edgeinfer.types import (
    Backend,
    FinishReason,
    Logits,
    PrefixCache,
    Refusal,
    Request,
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
        remember_shared_only: bool = False,
        drafting: Drafting | None = None,
    ) -> None:
        """Over `backend`. With `remember_shared_only` the prefix cache gets what two requests begin with, no more."""
        self._backend = backend
        self._make_sampler = make_sampler
        self._clock = clock
        self._residency = Residency(backend, prefix_cache)
        self.drafting = drafting if drafting and backend.capabilities.can_trim else Drafting((), backend.n_vocab, clock)
        limits = _clamp(limits, backend)
        self._max_tokens = min(backend.n_ctx, limits.max_request_tokens or backend.n_ctx)
        self.pace = Pace(limits.work)
        self._swap = Swap(self._residency, self.pace, clock)
        self._scheduler: Scheduler[Generation] = Scheduler(limits, self.pace)
        self._remember_shared_only = remember_shared_only
        self._grown: list[Generation] = []
        """Whose prompts have been computed further since the prefix cache saw them."""
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

        Raises what `check_prompt` raises, UsageError when there is nothing to do, OverloadError when too many wait.
        """
        n_prompt = len(request.tokens)
        self.check_prompt(n_prompt)
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}", "ask for at least one token")
        sampler = self._make_sampler(request.params)
        tokens: list[int] = request.tokens.tolist()
        for token in tokens:
            sampler.accept(token)
        recorder = None
        if request.constraint is not None:
            sampler = ConstrainedSampler(sampler, request.constraint)
        if request.logprobs is not None:
            sampler = recorder = RecordingSampler(sampler, request.logprobs)
        now_s = self._clock()
        generation = Generation(
            request=request,
            sampler=sampler,
            recorder=recorder,
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

    def check_prompt(self, n_tokens: int) -> None:
        """Raise UsageError for a prompt of no tokens, ContextOverflowError when it and one token more do not fit."""
        if n_tokens == 0:
            raise UsageError("the prompt is empty", "give at least one token")
        if n_tokens >= self._max_tokens:
            raise ContextOverflowError(
                f"the prompt has {n_tokens} tokens, the context holds {self._max_tokens}",
                f"raise the context size (-c {n_tokens + 256} or more) or shorten the prompt",
            )

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
        while self._grown:  # not before what the pass brought was shown
            self._remember(self._grown.pop())
        started_s = self._clock()
        if self._scheduler.waiting:
            self._admit(started_s)
        shares = self._plan(started_s)
        if not shares:
            return self._end_without_room() if self._scheduler.running else []
        n_tokens = sum(len(share.row.tokens) for share in shares)
        self._residency.reserve(n_tokens)
        planned_s = self._clock()
        result = self._backend.forward([share.row for share in shares])
        if result is Refusal.ABORTED:
            for generation in [share.generation for share in shares]:
                assert generation.seq_id is not None
                generation.n_computed = self._residency.cut(generation.seq_id, generation.n_computed)
            return self._finish_all_interrupted()
        if isinstance(result, Refusal):
            return self._shrink(n_tokens)
        computed_s = self._clock()
        events = self._commit(shares, result)
        n_new = sum(len(event.tokens) for event in events)
        self._observe(shares, n_new, computed_s - started_s, computed_s - planned_s)
        return events

    def _plan(self, now_s: float) -> list[Share]:
        """Whose tokens run now. Where the running requests have no room to grow, the least important one gives way."""
        scheduler = self._scheduler
        while scheduler.lacks_room(self._residency.n_free):
            self._preempt(scheduler.victim(now_s))
        room = Room(len(scheduler.running), self._residency.n_free, self._max_tokens, self.limits)
        drafts = self.drafting.propose(scheduler.decoding, room)
        n_drafted = sum(len(draft.tokens) for draft in drafts.values())
        rows = scheduler.rows(now_s, self._residency.n_free, n_drafted)
        return [Share.of(generation, length, drafts.get(generation)) for generation, length in rows]

    def _observe(self, shares: list[Share], n_new: int, step_s: float, forward_s: float) -> None:
        """Learn from how long a step took, and its forward pass, and how many tokens it brought."""
        n_decoding = sum(share.length == 1 for share in shares)
        n_prompt = sum(share.length for share in shares if share.length > 1)
        n_drafted = sum(len(share.drafted) for share in shares)
        if n_prompt:
            depth = next(share.row.pos0 for share in shares if share.length > 1)
            self.pace.observe_step(n_decoding, n_prompt + n_drafted, step_s, depth)
            return
        curve = self.drafting.curve
        self.pace.observe_step(n_decoding, 0, step_s * curve.cost(n_decoding) / curve.cost(n_decoding + n_drafted))
        self.drafting.observe_step(n_decoding, n_decoding + n_drafted, n_new, forward_s)

    def _commit(self, shares: list[Share], logits: Logits) -> list[TokenEvent]:
        """Note what is resident now, and choose tokens wherever the known ones are all computed."""
        events = []
        start = 0
        for share in shares:
            end = start + share.row.n_logits
            if end > start:
                events.append(self._write(share, logits[start:end]))
            else:
                self._computed(share.generation, share.generation.n_computed + share.length)
            start = end
        return events

    def _write(self, share: Share, logits: Logits) -> TokenEvent:
        """The tokens that a request gains: what is right of its draft, and one more.

        A request whose sampler finds no token ends, and the others go on.
        """
        generation, sampler = share.generation, share.generation.sampler
        if generation.prefilled_s is None:
            generation.prefilled_s = self._clock()
        n_known = len(generation.tokens)
        reason: FinishReason | None = None
        try:
            for token in accepted(share.drafted, lambda row: sampler.sample(logits[row])):
                sampler.accept(token)
                generation.tokens.append(token)
                if reason := self._ending(generation, token):
                    break
        except EdgeinferError as error:
            generation.error, reason = error, "interrupted"
        finally:  # also where the sampler raises, the cache must be what is known of it
            n_computed = max(n_known, len(generation.tokens) - 1)
            self._computed(generation, n_computed, n_rejected=n_known + len(share.drafted) - n_computed)
        new = generation.tokens[n_known:]
        if new:
            if generation.first_token_s is None:
                generation.first_token_s = self._clock()
            self.drafting.learn(generation, share.draft, new)
        if reason:
            self._finish(generation, reason)
        return TokenEvent(generation.request.id, tuple(new), from_draft=max(0, len(new) - 1), finish_reason=reason)

    def _computed(self, generation: Generation, n_computed: int, n_rejected: int = 0) -> None:
        """The cache holds so many of a request's tokens now, and behind them a rejected end of a draft."""
        assert generation.seq_id is not None
        self._residency.computed(generation.seq_id, generation.tokens[generation.n_computed : n_computed])
        if generation.n_computed < generation.prompt_tokens:
            self._grown.append(generation)
        generation.n_computed = n_computed
        if n_rejected:
            generation.n_computed = self._residency.cut(generation.seq_id, n_computed)
            if generation.n_computed < n_computed:  # a window had left the cells behind that are needed now
                self.drafting.stop()

    def _ending(self, generation: Generation, token: int) -> FinishReason | None:
        """Whether the answer ends with this token, its last."""
        if token in generation.request.end_tokens:
            return "stop"
        constraint = generation.request.constraint
        if constraint is not None and constraint.is_complete:
            return "schema"
        if generation.n_answered >= generation.max_tokens or len(generation.tokens) > self._max_tokens:
            return "length"
        return None

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        generation.finished_s = self._clock()
        self._swap.drop(generation)
        self.drafting.forget(generation)
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
        """Let the prefix cache have what is new of a prompt: whole blocks while more is to come, then the rest."""
        n_prompt = generation.prompt_tokens
        if generation.seq_id is None or generation.remembered >= n_prompt:
            return
        wanted = (generation.cached_tokens or 0) if self._remember_shared_only else n_prompt
        end = min(wanted, generation.n_computed)
        if end < n_prompt and generation.finish_reason is None:
            end -= end % BLOCK_TOKENS
        if end > generation.remembered:
            generation.remembered = end
            self._residency.remember(generation.seq_id, generation.request.tokens[:end])

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

    def _cached(self, generation: Generation, match: Match) -> Cached:
        """What a waiting request will find, now and when those that are being prefilled are done."""
        tokens, resident = generation.tokens, match.length
        coming = resident
        next_ones = tokens[resident : resident + MIN_SHARED_TOKENS]
        if self._residency.shares:
            for other in self._scheduler.running:
                # The whole is compared only where it goes on the same way: there may be many, and long ones.
                if other.remaining > 1 and other.tokens[resident : resident + MIN_SHARED_TOKENS] == next_ones:
                    coming = max(coming, common_length(other.tokens, tokens, 0, len(tokens) - 1))
        return Cached(resident, coming, match.in_use)

    def _preempt(self, generation: Generation) -> None:
        """A running request waits again."""
        assert generation.seq_id is not None
        self._swap.save(generation)
        self._residency.release(generation.seq_id)
        generation.seq_id, generation.n_computed = None, 0
        self._scheduler.suspend(generation)

    def _shrink(self, n_tokens: int) -> list[TokenEvent]:
        """The backend has less room than was counted: from now on that is counted, and the next step fits into it."""
        self._residency.refused(n_tokens)
        if len(self._scheduler.running) > 1 or self._residency.n_free > 0:
            return []
        return self._end_without_room()

    def _end_without_room(self) -> list[TokenEvent]:
        """A request that is alone and finds no room has filled the context: it ends there."""
        (generation,) = self._scheduler.running
        self._finish(generation, "length")
        return [TokenEvent(generation.request.id, (), finish_reason="length")]


def _clamp(limits: Limits | None, backend: Backend) -> Limits:
    """The limits on this backend: no more requests than sequences, no more tokens than a pass takes."""
    limits = limits or Limits(max_running=backend.capabilities.max_sequences)
    max_step_tokens = min(limits.max_step_tokens, backend.max_batch_tokens)
    max_running = min(limits.max_running, backend.capabilities.max_sequences, max_step_tokens)
    return replace(limits, max_running=max_running, max_step_tokens=max_step_tokens)
