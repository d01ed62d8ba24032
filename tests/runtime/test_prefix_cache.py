"""The engine with a prefix cache: every text is the one without, and `cached_tokens` are the truth."""

import numpy as np
import pytest
from cache_parts import open_cache

from edgeinfer.cache.folder import CacheFolder
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, make_fake_sampler
from edgeinfer.scheduling.policy import MIN_SHARED_TOKENS
from edgeinfer.types import Request

SAMPLED = SamplingParams(temperature=0.7, seed=7, ignore_eos=True)
SYSTEM = "You are a helpful assistant. " * 12
QUESTIONS = [SYSTEM + "Why is the sky blue?", SYSTEM + "What is 2 + 2?", "Something else entirely. " * 8]


class Process:
    """What a process has: a model, an engine, a view of the cache on disk."""

    def __init__(self, root, shared_only=False, **options):
        self.backend = FakeBackend(**{"n_ctx": 2000, "max_batch_tokens": 64, **options})
        self.cache = open_cache(root) if root else None
        self.engine = Engine(self.backend, make_fake_sampler, self.cache, remember_shared_only=shared_only)

    def ask(self, *prompts, max_tokens=8):
        requests = [
            self.engine.submit(Request(i, np.frombuffer(p.encode(), np.uint8).astype(np.int32), SAMPLED, max_tokens))
            for i, p in enumerate(prompts)
        ]
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work
        if self.cache:
            self.cache.close(30)
        return [(g.tokens[g.prompt_tokens :], g.cached_tokens) for g in requests]


def cold(prompt, **options):
    ((tokens, _),) = Process(None).ask(prompt, **options)
    return tokens


def test_a_second_process_restores_what_the_first_computed(tmp_path):
    (first,) = Process(tmp_path).ask(QUESTIONS[0])
    again = Process(tmp_path)
    (second,) = again.ask(QUESTIONS[0])
    other = Process(tmp_path)
    (third,) = other.ask(QUESTIONS[1])
    assert first == (cold(QUESTIONS[0]), 0)
    assert second == (cold(QUESTIONS[0]), len(QUESTIONS[0]) - 1)
    assert again.backend.computed_tokens == 1 + 7  # the prompt's last token, and the answer but its last
    shared = len(SYSTEM) + 2  # both questions begin with "Wh"
    assert third == (cold(QUESTIONS[1]), shared)
    assert other.backend.computed_tokens == len(QUESTIONS[1]) - shared + 7


def test_requests_side_by_side_are_remembered_and_restored(tmp_path):
    expected = [cold(q) for q in QUESTIONS]
    assert [tokens for tokens, _ in Process(tmp_path).ask(*QUESTIONS)] == expected
    answers = Process(tmp_path).ask(*QUESTIONS)
    assert [tokens for tokens, _ in answers] == expected
    assert [cached for _, cached in answers] == [len(q) - 1 for q in QUESTIONS]


def test_what_is_resident_goes_before_what_is_on_disk(tmp_path):
    Process(tmp_path).ask(QUESTIONS[0])
    process = Process(tmp_path)
    process.ask(QUESTIONS[0])
    CacheFolder(tmp_path).clear()
    (again,) = process.ask(QUESTIONS[0])
    assert again == (cold(QUESTIONS[0]), len(QUESTIONS[0]) - 1)


@pytest.mark.parametrize("n_ctx", [400, 700])
def test_a_small_context_changes_no_text(tmp_path, n_ctx):
    Process(tmp_path).ask(*QUESTIONS)
    expected = [cold(q) for q in QUESTIONS]
    answers = Process(tmp_path, n_ctx=n_ctx).ask(*QUESTIONS)
    assert [tokens for tokens, _ in answers] == expected


def test_a_prompt_that_fills_the_context_is_no_trouble(tmp_path):
    prompt = "x" * 299
    for _ in range(2):
        process = Process(tmp_path, n_ctx=300)
        ((tokens, _),) = process.ask(prompt, max_tokens=50)
        assert tokens == cold(prompt, max_tokens=50)[: len(tokens)]
        assert len(tokens) == 2


def test_an_interrupted_prompt_is_kept_as_far_as_it_got(tmp_path):
    process = Process(tmp_path)
    process.engine.submit(Request(0, np.frombuffer(QUESTIONS[0].encode(), np.uint8).astype(np.int32), SAMPLED, 8))
    for _ in range(3):
        process.engine.step()
    process.engine.interrupt()
    process.engine.step()
    process.cache.close(30)
    (answer,) = Process(tmp_path).ask(QUESTIONS[0])
    assert answer == (cold(QUESTIONS[0]), 3 * 64)


def test_a_long_prompt_is_kept_while_it_is_computed(tmp_path):
    prompt = QUESTIONS[0] * 3
    process = Process(tmp_path)
    saved = []
    save_range = process.backend.save_range
    process.backend.save_range = lambda seq, p0, p1: saved.append(p1) or save_range(seq, p0, p1)
    process.engine.submit(Request(0, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), SAMPLED, 8))
    at_once = []
    for _ in range(10):
        before = len(saved)
        process.engine.step()
        at_once.append(len(saved) - before)
    assert saved == [128, 256, 384, 512]  # of 9 passes of 64
    assert max(at_once) == 1
    process.cache.close(30)  # as far as a process comes that is killed now
    (answer,) = Process(tmp_path).ask(prompt)
    assert answer == (cold(prompt), 512)


@pytest.mark.parametrize("shared_only", [True, False])
def test_of_many_prompts_only_what_two_begin_with_is_worth_keeping(tmp_path, shared_only):
    expected = [cold(q) for q in QUESTIONS]
    assert [tokens for tokens, _ in Process(tmp_path, shared_only).ask(*QUESTIONS)] == expected
    answers = Process(tmp_path, shared_only).ask(*QUESTIONS)
    assert [tokens for tokens, _ in answers] == expected
    cached = [n for _, n in answers]
    if shared_only:
        # The second one starts when so little is missing of what both begin with that waiting does not pay.
        assert len(SYSTEM) + 2 - MIN_SHARED_TOKENS < cached[0] == cached[1] <= len(SYSTEM) + 2
        assert cached[2] == 0
    else:
        assert cached == [len(q) - 1 for q in QUESTIONS]
    nbytes = CacheFolder(tmp_path).usage()[0].bytes
    Process(tmp_path, shared_only).ask(*QUESTIONS)
    assert CacheFolder(tmp_path).usage()[0].bytes == nbytes


def test_what_a_window_has_left_behind_does_not_end_the_remembering(tmp_path):
    process = Process(tmp_path)
    save_range = process.backend.save_range
    process.backend.save_range = lambda *range: None
    process.engine.submit(Request(0, np.arange(150, dtype=np.int32), SAMPLED, 1))
    while process.engine.has_work:
        process.engine.step()
    process.backend.save_range = save_range
    process.ask(QUESTIONS[0])
    (answer,) = Process(tmp_path).ask(QUESTIONS[0])
    assert answer[1] == len(QUESTIONS[0]) - 1


def test_memory_that_cannot_be_saved_works_as_ever(tmp_path):
    for _ in range(2):
        ((tokens, cached),) = Process(tmp_path, can_trim=False).ask(QUESTIONS[0])
        assert (tokens, cached) == (cold(QUESTIONS[0]), 0)
