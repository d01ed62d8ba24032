"""The generation loop on a model whose text changes with any mistake in its KV cache."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import PATIENCE_S

from edgeinfer.errors import ContextOverflowError, OverloadError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import EOS, FakeBackend, make_fake_sampler
from edgeinfer.scheduling.policy import Limits
from edgeinfer.types import Request, Row

SAMPLED = SamplingParams(temperature=0.7, seed=7, repeat_penalty=1.5, ignore_eos=True)


def request(id, prompt, max_tokens=12, params=SAMPLED, end_tokens=frozenset()):
    return Request(id, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), params, max_tokens, end_tokens)


def engine_on(backend):
    return Engine(backend, make_fake_sampler)


def run(engine, generations):
    for _ in range(10_000):
        if all(g.finish_reason for g in generations):
            return [g.tokens[g.prompt_tokens :] for g in generations]
        engine.step()
    raise AssertionError("the engine makes no progress")


def alone(prompt, **options):
    engine = engine_on(FakeBackend(n_ctx=1000))
    return run(engine, [engine.submit(request(0, prompt, **options))])[0]


PROMPTS = ["a short one", "another, somewhat longer prompt " * 3, "x", "a short one too"]


def test_together_every_request_gets_the_text_it_gets_alone():
    engine = engine_on(FakeBackend(n_ctx=1000, max_batch_tokens=32))
    together = run(engine, [engine.submit(request(i, p)) for i, p in enumerate(PROMPTS)])
    assert together == [alone(p) for p in PROMPTS]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
@pytest.mark.parametrize("gap", [0, 1, 5])
def test_neither_order_nor_time_of_arrival_changes_a_text(order, gap):
    engine = engine_on(FakeBackend(n_ctx=1000, max_sequences=3))
    generations = {}
    for i in order:
        generations[i] = engine.submit(request(i, PROMPTS[i]))
        for _ in range(gap):
            engine.step()
    assert run(engine, [generations[i] for i in range(4)]) == [alone(p) for p in PROMPTS]


def test_requests_beyond_the_sequences_wait_their_turn():
    engine = engine_on(FakeBackend(n_ctx=1000, max_sequences=1))
    assert run(engine, [engine.submit(request(i, p)) for i, p in enumerate(PROMPTS)]) == [alone(p) for p in PROMPTS]


def test_events_tell_the_tokens_in_order_and_the_reason_once():
    engine = engine_on(FakeBackend())
    generation = engine.submit(request(5, "hello", max_tokens=4))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [t for e in events for t in e.tokens] == generation.tokens[5:]
    assert [e.finish_reason for e in events] == [None, None, None, "length"]
    assert {e.request_id for e in events} == {5}


def test_a_repeated_prompt_is_taken_from_the_cache_and_changes_nothing():
    backend = FakeBackend()
    engine = engine_on(backend)
    first = engine.submit(request(0, "the same prompt"))
    texts = run(engine, [first])
    computed = backend.computed_tokens
    second = engine.submit(request(1, "the same prompt"))
    assert run(engine, [second]) == texts
    assert (first.cached_tokens, second.cached_tokens) == (0, len("the same prompt") - 1)
    assert backend.computed_tokens - computed == 1 + len(texts[0]) - 1


def test_a_shared_beginning_is_reused_up_to_the_difference():
    engine = engine_on(FakeBackend(max_sequences=1))
    run(engine, [engine.submit(request(0, "common beginning, first end"))])
    second = engine.submit(request(1, "common beginning, second end"))
    assert run(engine, [second]) == [alone("common beginning, second end")]
    assert second.cached_tokens == len("common beginning, ")


def test_memory_that_cannot_be_trimmed_is_reused_only_when_all_of_it_fits():
    engine = engine_on(FakeBackend(max_sequences=1, can_trim=False))
    first = engine.submit(request(0, "abc", max_tokens=3))
    (answer,) = run(engine, [first])
    other = engine.submit(request(1, "abd"))
    assert run(engine, [other]) == [alone("abd")]
    assert other.cached_tokens == 0

    engine = engine_on(FakeBackend(max_sequences=1, can_trim=False))
    run(engine, [engine.submit(request(0, "abc", max_tokens=3))])
    longer = Request(1, np.array([*b"abc", *answer, 33], np.int32), SAMPLED, 5)
    generation = engine.submit(longer)
    run(engine, [generation])
    assert generation.cached_tokens == 5  # all but the token that was chosen last and never run


def test_an_end_token_ends_the_answer_and_is_its_last_token():
    text = alone("some prompt", max_tokens=30)
    engine = engine_on(FakeBackend())
    generation = engine.submit(request(0, "some prompt", max_tokens=30, end_tokens=frozenset({text[4]})))
    assert run(engine, [generation]) == [text[: text.index(text[4]) + 1]]
    assert generation.finish_reason == "stop"


def test_a_cancelled_request_leaves_no_trace_in_the_others():
    engine = engine_on(FakeBackend(n_ctx=1000))
    kept = engine.submit(request(0, PROMPTS[0]))
    cancelled = engine.submit(request(1, PROMPTS[1]))
    for _ in range(3):
        engine.step()
    engine.cancel(1)
    engine.cancel(99)
    later = engine.submit(request(2, PROMPTS[1]))
    assert run(engine, [kept, later]) == [alone(PROMPTS[0]), alone(PROMPTS[1])]
    assert cancelled.finish_reason == "interrupted"
    assert later.cached_tokens > 0


def test_a_full_cache_makes_the_youngest_wait_and_changes_no_text():
    prompts = ["first " * 5, "second " * 5, "third " * 5]
    engine = engine_on(FakeBackend(n_ctx=130))
    generations = [engine.submit(request(i, p, max_tokens=40)) for i, p in enumerate(prompts)]
    assert run(engine, generations) == [alone(p, max_tokens=40) for p in prompts]
    assert [g.finish_reason for g in generations] == ["length"] * 3


def test_what_only_waits_to_be_reused_gives_way_to_a_running_request():
    engine = engine_on(FakeBackend(n_ctx=64))
    run(engine, [engine.submit(request(0, "z" * 40, max_tokens=5))])
    assert run(engine, [engine.submit(request(1, "y" * 40, max_tokens=20))]) == [alone("y" * 40, max_tokens=20)]


def test_an_answer_ends_where_the_context_is_full():
    engine = engine_on(FakeBackend(n_ctx=32))
    generation = engine.submit(request(0, "p" * 20, max_tokens=1000))
    (text,) = run(engine, [generation])
    assert generation.finish_reason == "length"
    assert text == alone("p" * 20, max_tokens=1000)[: len(text)]
    assert 20 + len(text) == 33  # the last one is chosen by the last that fits


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers():
    backend = FakeBackend(n_ctx=32)
    with pytest.raises(ContextOverflowError, match=r"40 tokens.* 32"):
        engine_on(backend).submit(request(0, "p" * 40))
    assert backend.forwards == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [("", 5), ("x", 0)])
def test_nothing_to_do_is_a_usage_error(prompt, max_tokens):
    with pytest.raises(UsageError):
        engine_on(FakeBackend()).submit(request(0, prompt, max_tokens=max_tokens))


@pytest.mark.parametrize("can_trim", [True, False])
def test_after_an_interrupt_in_a_prompt_the_next_answer_is_the_usual_one(can_trim):
    backend = FakeBackend(n_ctx=1000, max_batch_tokens=16, can_trim=can_trim)
    engine = engine_on(backend)
    generation = engine.submit(request(0, PROMPTS[1]))
    engine.step()
    backend.abort()  # as if it came in the middle of the next pass
    events = engine.step()
    assert [e.finish_reason for e in events] == ["interrupted"]
    assert generation.finish_reason == "interrupted"
    assert not engine.has_work
    assert run(engine, [engine.submit(request(1, PROMPTS[1]))]) == [alone(PROMPTS[1])]


def test_an_interrupt_from_another_thread_ends_everything_that_runs_or_waits():
    engine = engine_on(FakeBackend(max_sequences=1))
    generations = [engine.submit(request(i, "hello")) for i in range(2)]
    engine.step()
    thread = threading.Thread(target=engine.interrupt)
    thread.start()
    thread.join(PATIENCE_S)
    engine.step()
    assert [g.finish_reason for g in generations] == ["interrupted"] * 2


def test_an_interrupt_that_comes_too_late_does_not_hit_the_next_request():
    engine = engine_on(FakeBackend())
    run(engine, [engine.submit(request(0, "hello"))])
    engine.interrupt()
    assert run(engine, [engine.submit(request(1, "hello"))]) == [alone("hello")]


def test_the_fake_backend_refuses_holes_and_double_writes():
    backend = FakeBackend()
    engine = engine_on(backend)
    run(engine, [engine.submit(request(0, "hello", end_tokens=frozenset({EOS})))])
    with pytest.raises(ValueError, match="starts at 2"):
        backend.forward([Row(0, np.array([3], np.int32), 2, 0)])


COMMON = "a long beginning that all of these prompts have in common, word by word; "
TAILS = ["one", "two and more", "three", "four with something else after it"]


def test_a_common_beginning_is_computed_once_and_shared_while_all_run():
    backend = FakeBackend(n_ctx=400, max_sequences=8, max_batch_tokens=48)
    engine = engine_on(backend)
    generations = [engine.submit(request(i, COMMON + tail)) for i, tail in enumerate(TAILS)]
    assert run(engine, generations) == [alone(COMMON + tail) for tail in TAILS]
    cached = [g.cached_tokens for g in generations]
    assert cached.count(0) == 1
    assert all(c >= len(COMMON) for c in cached if c)
    assert backend.computed_tokens == sum(g.prompt_tokens - g.cached_tokens + g.n_answered - 1 for g in generations)


def test_shared_cells_count_once_so_more_requests_fit():
    backend = FakeBackend(n_ctx=len(COMMON) + 150, max_sequences=4)
    engine = engine_on(backend)
    generations = [engine.submit(request(i, COMMON + tail)) for i, tail in enumerate(TAILS)]
    run(engine, generations)
    assert [g.finish_reason for g in generations] == ["length"] * 4
    assert sum(len(g.tokens) for g in generations) > 1.5 * backend.n_ctx
    assert max(g.first_token_s for g in generations) < min(g.finished_s for g in generations)  # all at the same time


def test_memory_that_cannot_share_computes_every_prompt_and_says_so():
    engine = engine_on(FakeBackend(n_ctx=1000, can_trim=False))
    generations = [engine.submit(request(i, COMMON + tail)) for i, tail in enumerate(TAILS)]
    assert run(engine, generations) == [alone(COMMON + tail) for tail in TAILS]
    assert [g.cached_tokens for g in generations] == [0] * 4


def test_a_window_that_has_left_a_beginning_behind_is_not_trusted():
    backend = FakeBackend(n_ctx=1000, max_sequences=2, window=20)
    engine = engine_on(backend)
    (answer,) = run(engine, [engine.submit(request(0, COMMON + "one"))])
    changed = engine.submit(request(1, COMMON + "two"))
    assert run(engine, [changed]) == [alone(COMMON + "two")]
    assert changed.cached_tokens == 0
    tokens = np.array([*(COMMON + "one").encode(), *answer, 33], np.int32)
    longer = engine.submit(Request(2, tokens, SAMPLED, 5))
    run(engine, [longer])
    assert longer.cached_tokens == len(tokens) - 2  # the sequence as it ended, which lacks its last token


@pytest.mark.parametrize("can_save", [True, False])
def test_a_swapped_or_recomputed_request_goes_on_undisturbed(can_save):
    backend = FakeBackend(n_ctx=300, max_sequences=2, can_save=can_save)
    engine = Engine(backend, make_fake_sampler, limits=Limits(max_running=1))
    slow = engine.submit(request(0, PROMPTS[1], max_tokens=30))
    for _ in range(12):
        engine.step()
    assert 0 < slow.n_answered < 30
    urgent = Request(1, np.array([*b"x" * 180], np.int32), SAMPLED, 60, priority=5)
    overtaking = engine.submit(urgent)
    engine.step()
    assert slow.seq_id is None
    assert (slow.swapped is not None) == can_save
    written = slow.n_answered
    before = backend.computed_tokens
    texts = run(engine, [slow, overtaking])
    assert texts[0] == alone(PROMPTS[1], max_tokens=30)
    assert texts[1] == alone("x" * 180, max_tokens=60)
    assert overtaking.finished_s < slow.finished_s
    needed = (180 - 64) + 59 + (30 - written)
    evicted = 64  # the end of what it held, all that the urgent one needed
    assert backend.computed_tokens - before == needed + (0 if can_save else evicted)


def test_a_queue_that_is_full_refuses_and_what_waits_goes_on():
    engine = Engine(FakeBackend(), make_fake_sampler, limits=Limits(max_running=1, max_waiting=1))
    first = engine.submit(request(0, "a"))
    engine.step()
    second = engine.submit(request(1, "b"))
    with pytest.raises(OverloadError):
        engine.submit(request(2, "c"))
    assert run(engine, [first, second]) == [alone("a"), alone("b")]


def test_a_request_has_a_limit_of_its_own_in_a_larger_cache():
    engine = Engine(FakeBackend(n_ctx=400), make_fake_sampler, limits=Limits(4, max_request_tokens=32))
    generation = engine.submit(request(0, "p" * 20, max_tokens=1000))
    run(engine, [generation])
    assert generation.n_answered == 13
    with pytest.raises(ContextOverflowError, match="holds 32"):
        engine.submit(request(1, "p" * 40))


def test_a_backend_with_less_room_than_counted_costs_time_and_no_text():
    class Short(FakeBackend):
        """Says that it holds more than it does."""

        @property
        def n_ctx(self):
            return super().n_ctx + 80

    engine = engine_on(Short(n_ctx=100))
    generations = [engine.submit(request(i, p * 4, max_tokens=20)) for i, p in enumerate(["one ", "two ", "three "])]
    texts = [alone(p * 4, max_tokens=20) for p in ["one ", "two ", "three "]]
    assert run(engine, generations) == texts


class FakeStore:
    """A prefix store in memory, in blocks of four."""

    def __init__(self):
        self.blobs = {}

    def match(self, tokens):
        length = 0
        while tuple(tokens[: length + 4].tolist()) in self.blobs and length + 4 <= len(tokens):
            length += 4
        return length

    def restore(self, backend, seq, tokens, start):
        end = self.match(tokens)
        for p0 in range(start - start % 4, end, 4):
            assert backend.load_range(seq, p0, p0 + 4, self.blobs[tuple(tokens[: p0 + 4].tolist())])
        return end

    def remember(self, backend, seq, tokens):
        for p0 in range(0, len(tokens) - 3, 4):
            self.blobs.setdefault(tuple(tokens[: p0 + 4].tolist()), backend.save_range(seq, p0, p0 + 4))


def test_a_second_process_takes_up_what_the_first_one_stored():
    store = FakeStore()
    first = Engine(FakeBackend(n_ctx=1000), make_fake_sampler, prefix_cache=store)
    run(first, [first.submit(request(0, COMMON + "one"))])
    backend = FakeBackend(n_ctx=1000)
    second = Engine(backend, make_fake_sampler, prefix_cache=store)
    generation = second.submit(request(1, COMMON + "two"))
    assert run(second, [generation]) == [alone(COMMON + "two")]
    assert generation.cached_tokens == len(COMMON) // 4 * 4
    assert backend.computed_tokens == generation.prompt_tokens - generation.cached_tokens + 11


@st.composite
def workloads(draw):
    """Requests with prompts that overlap, when they come, and when some of them are cancelled."""
    beginnings = ["", COMMON[:30], COMMON[:30] + "!" * 20]
    count = draw(st.integers(2, 7))
    return [
        (
            draw(st.sampled_from(beginnings)) + draw(st.text("ab", min_size=1, max_size=25)),
            draw(st.integers(1, 25)),
            draw(st.integers(0, 3)),
            draw(st.integers(0, 30)),
            draw(st.one_of(st.none(), st.integers(0, 20))),
        )
        for _ in range(count)
    ]


@settings(max_examples=120)
@given(
    workloads(),
    st.integers(90, 200),
    st.integers(1, 4),
    st.integers(8, 64),
    st.sampled_from([{}, {"can_save": False}, {"can_trim": False}, {"window": 25}]),
    st.booleans(),
)
def test_whatever_else_happens_every_text_is_the_one_alone(workload, n_ctx, width, batch, memory, stored):
    backend = FakeBackend(n_ctx=n_ctx, max_sequences=width + 1, max_batch_tokens=batch, **memory)
    store = FakeStore() if stored and not memory else None
    clock = itertools.count()
    limits = Limits(max_running=width, latency_target_ms=3000.0)
    engine = Engine(backend, make_fake_sampler, clock=lambda: float(next(clock)), limits=limits, prefix_cache=store)
    generations = {}
    for step in range(3000):
        for i, (prompt, max_tokens, priority, arrives, _) in enumerate(workload):
            if arrives == step:
                tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
                generations[i] = engine.submit(Request(i, tokens, SAMPLED, max_tokens, priority=priority))
        for i, (*_, arrives, cancelled) in enumerate(workload):
            if cancelled is not None and step == arrives + cancelled:
                engine.cancel(i)
        if len(generations) == len(workload) and not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    for i, (prompt, max_tokens, *_) in enumerate(workload):
        generation = generations[i]
        text = alone(prompt, max_tokens=max_tokens)[: n_ctx + 1 - len(prompt)]  # the context may be full before
        written = generation.tokens[generation.prompt_tokens :]
        assert written == (text if generation.finish_reason == "length" else text[: len(written)])
        assert generation.finish_reason in ("length", "interrupted")
    tree = engine._residency._tree
    assert tree.n_referenced == 0
    for seq_id in range(width + 1):
        assert backend.held(seq_id) == (tree.tokens(seq_id) if seq_id in tree else [])
    assert tree.n_cells == backend._used_cells
