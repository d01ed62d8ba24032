"""Who runs next: rules over plain state, and a simulation in which nobody may starve."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import OverloadError
from edgeinfer.scheduling.job import Job
from edgeinfer.scheduling.policy import AGEING_S, DEFAULT_STEPS, Limits, Pace, prefill_budget
from edgeinfer.scheduling.scheduler import Cached, Scheduler

NOTHING = Cached(0, 0, 0)


def job(n_prompt=10, computed=0, max_tokens=20, arrived_s=0.0, priority=0, deadline_s=None):
    return Job(
        tokens=list(range(n_prompt)),
        prompt_tokens=n_prompt,
        max_tokens=max_tokens,
        arrived_s=arrived_s,
        priority=priority,
        deadline_s=deadline_s,
        n_computed=computed,
    )


def scheduler(jobs=(), running=(), **limits):
    made = Scheduler(Limits(**{"max_running": 4, **limits}), Pace())
    for each in jobs:
        made.enqueue(each)
    for each in running:
        made.enqueue(each)
        made.start(each)
    return made


def order(jobs, now_s=0.0, cached=lambda job: NOTHING):
    """The order in which they are let in."""
    work = scheduler(jobs, max_running=len(jobs))
    chosen = []
    while found := work.choose(now_s, cached, 10**6):
        work.start(found)
        chosen.append(jobs.index(found))
    return chosen


def test_priority_then_deadline_then_the_shorter_one():
    jobs = [job(), job(priority=1), job(deadline_s=9.0), job(deadline_s=5.0), job(max_tokens=5), job(n_prompt=400)]
    assert order(jobs) == [1, 3, 2, 4, 0, 5]


def test_waiting_raises_the_priority():
    old, new = job(arrived_s=0), job(arrived_s=3 * AGEING_S, priority=2)
    assert order([new, old], now_s=3 * AGEING_S) == [1, 0]
    assert order([new, old], now_s=2 * AGEING_S - 1) == [0, 1]


def test_the_longest_cached_prompt_goes_first():
    jobs = [job(n_prompt=100), job(n_prompt=300), job(n_prompt=300)]
    cached = {id(jobs[1]): Cached(100, 100, 0), id(jobs[2]): Cached(200, 200, 0)}
    assert order(jobs, cached=lambda j: cached.get(id(j), NOTHING)) == [2, 1, 0]


def test_a_prompt_that_another_one_is_computing_waits_for_it_and_lets_others_pass():
    first, twin, other = job(n_prompt=200, computed=50), job(n_prompt=200), job(n_prompt=500)
    work = scheduler([twin, other], running=[first])
    assert work.choose(0, lambda j: Cached(50, 190, 0) if j is twin else NOTHING, 10**6) is other
    assert work.choose(0, lambda j: Cached(190, 190, 0) if j is twin else NOTHING, 10**6) is twin


def test_what_only_lacks_room_is_not_overtaken():
    big, small = job(n_prompt=1000, priority=1), job()
    work = scheduler([big, small], running=[job(computed=9)])
    assert work.choose(0, lambda j: NOTHING, 500) is None
    assert work.choose(0, lambda j: NOTHING, 2000) is big
    assert scheduler([big]).choose(0, lambda j: NOTHING, 1) is big  # alone it always has room


def test_too_many_requests_are_refused_with_the_number():
    work = scheduler([job(), job()], max_waiting=2)
    with pytest.raises(OverloadError, match="2 requests are waiting"):
        work.enqueue(job())


def test_answers_run_before_prompts_and_the_step_keeps_its_budget():
    answering, long, short = job(n_prompt=11, computed=10), job(n_prompt=100), job(n_prompt=50, priority=1)
    work = scheduler(running=[long, answering, short], max_step_tokens=64, latency_target_ms=math.inf)
    assert work.rows(0, 10**6) == [(answering, 1), (short, 50), (long, 13)]
    assert work.rows(0, 20) == [(answering, 1), (short, 19)]


def test_a_higher_priority_takes_the_place_of_the_lowest_but_age_does_not():
    running = [job(priority=1), job(arrived_s=1), job(arrived_s=2)]
    assert scheduler([job(arrived_s=3, priority=1)], running, max_running=3).outranked(3) is running[2]
    assert scheduler([job(arrived_s=3, priority=1)], running).outranked(3) is None  # there is a place
    assert scheduler([job(arrived_s=-100)], running, max_running=3).outranked(3) is None
    assert scheduler([job(priority=1)], running, max_running=3).outranked(AGEING_S + 2) is None


def test_without_room_for_every_answer_one_gives_way():
    running = [job(computed=9), job(computed=9)]
    assert scheduler(running=running).lacks_room(1)
    assert not scheduler(running=running).lacks_room(2)
    assert not scheduler(running=running[:1]).lacks_room(0)


def pace(decode_ms=20.0, rate=1000.0):
    measured = Pace()
    measured.observe_step(4, 0, decode_ms / 1e3)
    measured.observe_step(0, 512, 512 / rate)
    return measured


def test_the_budget_follows_from_the_target_and_the_rate():
    limits = Limits(max_running=8, latency_target_ms=100)
    measured = pace(decode_ms=20, rate=1000)
    assert prefill_budget(limits, measured, 4) == 40  # half the rate until a mixed step was measured, in fours
    measured.observe_step(4, 40, 20e-3 + 40 / 800)
    assert prefill_budget(limits, measured, 4) == 64  # 80 ms at 800 per second
    assert (prefill_budget(limits, measured, 3) + 3) % 4 == 0
    assert prefill_budget(limits, measured, 0) == 512
    assert prefill_budget(Limits(8, latency_target_ms=math.inf), measured, 4) == 508


def test_the_default_target_is_a_few_decode_steps():
    measured = pace(decode_ms=20)
    measured.observe_step(4, 20, 40e-3)  # 1000 per second
    spare_ms = (DEFAULT_STEPS - 1) * 20
    assert spare_ms - 4 < prefill_budget(Limits(8), measured, 4) <= spare_ms


def test_a_step_that_was_quick_by_chance_does_not_let_a_whole_prompt_in():
    """Seen on a real model: 4 tokens of a prompt in the time of none, then 500 at once, a gap of two seconds."""
    pace = Pace()
    pace.observe_step(0, 128, 0.5)  # 256 tokens a second
    pace.observe_step(4, 0, 0.025)
    for _ in range(10):
        pace.observe_step(4, 4, 0.025)
    assert prefill_budget(Limits(8), pace, 4) == 8


def test_even_an_impossible_target_lets_prompts_go_on():
    assert prefill_budget(Limits(8, latency_target_ms=1), pace(), 4) == 4


def test_what_answers_alone_take_is_measured_before_a_prompt_is_let_in_beside_them():
    """Otherwise prompts that keep coming would go on in the smallest pieces: no step would be without one."""
    pace = Pace()
    pace.observe_step(0, 512, 0.5)
    assert prefill_budget(Limits(8), pace, 4) == 0
    pace.observe_step(4, 0, 0.02)
    assert prefill_budget(Limits(8), pace, 4) > 4


def test_steps_that_something_delayed_are_outvoted():
    steady, disturbed = pace(), pace()
    for number in range(20):
        for measured, factor in ((steady, 1), (disturbed, 5 if number % 4 == 0 else 1)):
            measured.observe_step(4, 0, factor * 20e-3)
            measured.observe_step(4, 20, 20e-3 + factor * 25e-3)
    assert prefill_budget(Limits(8), disturbed, 4) == prefill_budget(Limits(8), steady, 4)


def test_the_next_piece_is_smaller_the_deeper_it_begins_and_not_larger_where_a_new_prompt_begins():
    measured = pace()
    for _ in range(5):
        measured.observe_step(4, 40, 20e-3 + 50e-3, 512)
    budgets = [prefill_budget(Limits(8, latency_target_ms=100), measured, 4, depth=depth) for depth in (0, 512, 1536)]
    assert budgets == [64, 64, 32]


def test_swapping_is_tried_and_then_weighed_against_computing():
    measured = pace(rate=1000)
    assert measured.swaps()
    measured.observe_swap(100, 10e-3)
    assert measured.swaps()
    for _ in range(20):
        measured.observe_swap(100, 1.0)
    assert not measured.swaps()


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(1, 8), st.integers(-2, 3)), min_size=1, max_size=14
)


@settings(max_examples=150)
@given(ARRIVALS, st.integers(1, 4), st.integers(70, 200), st.sampled_from([None, 50.0, math.inf]))
def test_nobody_starves_and_no_budget_is_exceeded(arrivals, width, n_cells, target):
    """A machine where a step takes a second, under requests of all priorities, with an endless flow of urgent ones."""
    limits = Limits(max_running=width, max_step_tokens=32, latency_target_ms=target)
    work = Scheduler(limits, pace(decode_ms=20))
    due = sorted((at, n_prompt, n_answer, priority) for at, n_prompt, n_answer, priority in arrivals)
    watched = []
    for now_s in range(3000):
        while due and due[0][0] <= now_s:
            at, n_prompt, n_answer, priority = due.pop(0)
            watched.append(job(n_prompt, max_tokens=n_answer, arrived_s=at, priority=priority))
            work.enqueue(watched[-1])
        if not due and all(j.n_answered == j.max_tokens for j in watched):
            return
        if now_s % 2 == 0 and len(work.waiting) < 50:
            work.enqueue(job(4, max_tokens=3, arrived_s=now_s, priority=3))

        def free():
            return n_cells - sum(j.n_computed for j in work.running)

        lowest = work.outranked(now_s)
        if lowest is not None:
            lowest.n_computed = 0
            work.suspend(lowest)
        while found := work.choose(now_s, lambda j: NOTHING, free()):
            work.start(found)
        while work.lacks_room(free()):
            loser = work.victim(now_s)
            loser.n_computed = 0
            work.suspend(loser)
        rows = work.rows(now_s, free())
        assert rows
        assert len(work.running) <= width
        assert sum(length for _, length in rows) <= min(free(), limits.max_step_tokens)
        for each, length in rows:
            each.n_computed += length
            if each.remaining == 0:
                each.tokens.append(0)
                if each.n_answered == each.max_tokens:
                    work.forget(each)
    raise AssertionError("a request starves")
