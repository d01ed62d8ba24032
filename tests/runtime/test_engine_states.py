"""The engine under any interleaving of requests, steps, cancellations, interrupts and refusals, in little room."""

import itertools

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeinfer.errors import ContextOverflowError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, make_fake_sampler
from edgeinfer.scheduling.policy import AGEING_S, Limits
from edgeinfer.types import Request

SAMPLED = SamplingParams(temperature=0.7, seed=7, repeat_penalty=1.5, ignore_eos=True)
BEGINNINGS = [b"", b"a beginning that prompts share ", b"a beginning that prompts share, and another one "]
MAX_ANSWER = 25
MEMORIES = [{}, {}, {"can_save": False}, {"can_trim": False}, {"window": 5}, {"window": 25}]
_known: dict[bytes, list[int]] = {}


class Smaller(FakeBackend):
    """Has less room than it says."""

    missing = 0

    @property
    def n_ctx(self):
        return super().n_ctx + self.missing


def request(id, prompt, max_tokens=MAX_ANSWER, priority=0, deadline_ms=None):
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)
    return Request(id, tokens, SAMPLED, max_tokens, priority=priority, deadline_ms=deadline_ms)


def alone(prompt, length):
    if prompt not in _known:
        engine = Engine(FakeBackend(n_ctx=1000, max_sequences=1), make_fake_sampler)
        generation = engine.submit(request(0, prompt))
        while engine.has_work:
            engine.step()
        _known[prompt] = generation.tokens[generation.prompt_tokens :]
    return _known[prompt][:length]


class Machine(RuleBasedStateMachine):
    """What is resident is what the backend holds, every text is the one alone, and all come to an end."""

    @initialize(
        n_ctx=st.sampled_from([16, 40, 64, 100, 160]),
        missing=st.sampled_from([0, 0, 0, 30]),
        width=st.integers(1, 5),
        kept=st.integers(0, 3),
        batch=st.integers(1, 64),
        target_ms=st.sampled_from([None, 1.0, 3000.0, float("inf")]),
        tick_s=st.sampled_from([0.001, 0.3, 20.0]),
        memory=st.sampled_from(MEMORIES),
    )
    def begin(self, n_ctx, missing, width, kept, batch, target_ms, tick_s, memory):
        self.backend = Smaller(n_ctx=n_ctx, max_sequences=width + kept, max_batch_tokens=batch, **memory)
        self.backend.missing = missing
        clock = itertools.count()
        limits = Limits(width, latency_target_ms=target_ms)
        self.engine = Engine(self.backend, make_fake_sampler, clock=lambda: next(clock) * tick_s, limits=limits)
        self.requests = []
        self.idle_steps = 0

    @rule(
        prompts=st.lists(st.tuples(st.sampled_from(BEGINNINGS), st.binary(min_size=1, max_size=12)), max_size=4),
        max_tokens=st.integers(1, MAX_ANSWER),
        priority=st.sampled_from([0, 0, 1, 5, -5]),
        deadline_ms=st.sampled_from([None, 1.0, 1e6]),
    )
    def submit(self, prompts, max_tokens, priority, deadline_ms):
        for prompt in map(b"".join, prompts):
            wanted = request(len(self.requests), prompt, max_tokens, priority, deadline_ms)
            try:
                self.requests.append((prompt, self.engine.submit(wanted)))
            except ContextOverflowError:
                assert len(prompt) >= self.backend.n_ctx

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            before = self.backend.forwards
            events = self.engine.step()
            stands_still = self.engine.has_work and not events and self.backend.forwards == before
            self.idle_steps = self.idle_steps + 1 if stands_still else 0
            assert self.idle_steps <= self.backend.missing + 1  # what is refused is tried with less

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        _, generation = data.draw(st.sampled_from(self.requests))
        self.engine.cancel(generation.request.id)
        assert generation.finish_reason is not None

    @rule(in_a_pass=st.booleans())
    def interrupt(self, in_a_pass):
        if not self.engine.has_work:
            return
        if in_a_pass:
            self.backend.abort()
        else:
            self.engine.interrupt()
        for _ in range(self.backend.missing + 2):  # a pass that never began cannot be aborted
            self.engine.step()
            if not self.engine.has_work:
                break
        assert not self.engine.has_work

    @invariant()
    def what_is_resident_is_what_the_backend_holds(self):
        tree = self.engine._residency._tree
        for seq_id in range(self.backend.capabilities.max_sequences):
            assert self.backend.held(seq_id) == (tree.tokens(seq_id) if seq_id in tree else [])
        assert tree.n_cells == self.backend._used_cells
        assert tree.n_referenced <= tree.n_cells

    @invariant()
    def every_text_is_the_one_alone(self):
        for prompt, generation in self.requests:
            answer = generation.tokens[generation.prompt_tokens :]
            assert answer == alone(prompt, len(answer))

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(200 * (1 + len(self.requests))):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.engine.has_work
        for _, generation in self.requests:
            enough = generation.n_answered == generation.max_tokens or len(generation.tokens) > self.engine._max_tokens
            assert generation.finish_reason == "interrupted" or enough or self.backend.missing
        self.what_is_resident_is_what_the_backend_holds()
        self.every_text_is_the_one_alone()
        assert self.engine._residency._tree.n_referenced == 0
        assert self.engine._swap._nbytes == 0


# Shrinking takes minutes, and a failure is short enough.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None, phases=PHASES)
test_any_interleaving = Machine.TestCase


def test_a_stream_of_urgent_requests_starves_nobody():
    clock = itertools.count()
    backend = FakeBackend(n_ctx=120, max_sequences=3)
    engine = Engine(backend, make_fake_sampler, clock=lambda: next(clock) * 0.1, limits=Limits(2))
    humble = engine.submit(request(0, b"one that can wait", priority=-3))
    for i in range(1, 2000):
        if len(engine._scheduler.waiting) < 4:
            engine.submit(request(i, b"urgent %d" % i, priority=3))
        engine.step()
        if humble.finish_reason:
            break
    assert humble.finish_reason == "length"
    assert humble.finished_s - humble.arrived_s < 3 * (3 + 3) * AGEING_S


def test_resident_ends_that_nobody_uses_are_no_extra_room():
    """They count as free: a request that takes them up needs them all the same."""
    backend = FakeBackend(n_ctx=300, max_sequences=6)
    engine = Engine(backend, make_fake_sampler, limits=Limits(3, latency_target_ms=float("inf")))
    long = b"l" * 250
    engine.submit(request(0, long, 2))
    while engine.has_work:
        engine.step()
    requests = [engine.submit(request(1, b"a short one", 150))]
    for _ in range(5):
        engine.step()
    requests += [engine.submit(request(i, long + b"!" * i, 50)) for i in (2, 3)]
    preempted = 0
    while engine.has_work:
        before = len(engine._scheduler.running)
        events = engine.step()
        preempted += before - len(engine._scheduler.running) > sum(e.finish_reason is not None for e in events)
    assert [g.finish_reason for g in requests] == ["length"] * 3
    assert preempted == 0
    assert backend.computed_tokens <= 251 + 11 + 150 + 2 * 255 + 2 * 50


def test_a_prompt_that_a_smaller_backend_cannot_hold_ends():
    backend = Smaller(n_ctx=16, max_sequences=2)
    backend.missing = 30
    engine = Engine(backend, make_fake_sampler)
    generations = [engine.submit(request(i, b"x" * 30 + bytes([i]))) for i in range(3)]
    for _ in range(300):
        engine.step()
    assert not engine.has_work
    assert [g.finish_reason for g in generations] == ["length"] * 3
