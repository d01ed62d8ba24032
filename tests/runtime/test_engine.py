"""The generation loop on a model whose text changes with any mistake in its KV cache."""

import itertools
import threading

import numpy as np
import pytest

from edgeinfer.errors import ContextOverflowError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import EOS, FakeBackend, make_fake_sampler
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
    thread.join()
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
