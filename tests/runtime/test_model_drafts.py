"""With drafts by a model, a good one or a bad one, every text is the one without, exactly."""

import numpy as np
import pytest

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import N_VOCAB, FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.lookup import Lookup
from edgeinfer.speculation.model import ModelSource
from edgeinfer.types import Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0, repeat_penalty=1.5, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.3, seed=7, repeat_penalty=1.2, ignore_eos=True)
PROMPTS = ["a short one", "another, somewhat longer prompt " * 5, "x", "a short one too"]


class Target(FakeBackend):
    """Time passes by its passes, a row more costs little; the draft model's passes take `draft_s` each."""

    def __init__(self, *, now=None, cost_s=1.0, wrong_every=0, **options):
        super().__init__(**options)
        self.now = [0.0] if now is None else now
        self.cost_s, self.wrong_every = cost_s, wrong_every

    def forward(self, rows):
        self.now[0] += self.cost_s * (1 + 0.05 * sum(len(row.tokens) for row in rows))
        return super().forward(rows)

    def _logits(self, state):
        line = 4 * super()._logits(state)
        return -line if self.wrong_every and state % self.wrong_every == 0 else line


def engine_with(*, wrong_every=None, width=4, sequences=4, draft_sequences=4, draft_s=0.1, n_ctx=2000):
    """An engine over a target, and its draft model: a copy of the target that is wrong now and then."""
    target = Target(n_ctx=n_ctx, max_sequences=sequences)

    def clock():
        return target.now[0]

    if wrong_every is None:
        return Engine(target, make_fake_sampler, clock=clock, limits=Limits(width)), None
    small = Target(now=target.now, cost_s=draft_s, wrong_every=wrong_every, n_ctx=n_ctx, max_sequences=draft_sequences)
    sources = [Lookup(), ModelSource("small", small, N_VOCAB)]
    drafting = Drafting(sources, N_VOCAB, clock)
    return Engine(target, make_fake_sampler, clock=clock, limits=Limits(width), drafting=drafting), small


def answers(engine, prompts, params, max_tokens=60, end_tokens=frozenset()):
    generations = []
    for i, prompt in enumerate(prompts):
        tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
        generations.append(engine.submit(Request(i, tokens, params, max_tokens, end_tokens)))
    while engine.has_work:
        engine.step()
    return [g.tokens[g.prompt_tokens :] for g in generations], generations


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SAMPLED], ids=["greedy", "penalized", "sampled"])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("width", [1, 4])
def test_a_text_with_drafts_by_a_model_is_the_text_without(params, wrong_every, width):
    texts, _ = answers(engine_with(width=width)[0], PROMPTS, params)
    engine, _ = engine_with(wrong_every=wrong_every, width=width)
    drafted, generations = answers(engine, PROMPTS, params)
    assert drafted == texts
    use = engine.drafting.use["small"]
    assert use.failures == 0
    assert sum(g.drafted_tokens for g in generations) > 0
    if wrong_every == 0 and params is GREEDY and width == 1:
        assert use.accepted_tokens > 120
        assert engine.drafting.speed_up > 1.5


def test_other_seeds_give_other_texts_and_the_same_with_drafts():
    seen = []
    for seed in range(6):
        params = SamplingParams(temperature=2.0, seed=seed, ignore_eos=True)
        texts, _ = answers(engine_with()[0], PROMPTS, params)
        assert answers(engine_with(wrong_every=5)[0], PROMPTS, params)[0] == texts
        seen.append(texts)
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_fewer_sequences_than_requests_leave_some_without_drafts_and_change_nothing():
    texts, _ = answers(engine_with()[0], PROMPTS, GREEDY)
    engine, _ = engine_with(wrong_every=0, draft_sequences=1)
    assert answers(engine, PROMPTS, GREEDY)[0] == texts


def test_a_draft_model_with_too_small_a_cache_changes_nothing():
    texts, _ = answers(engine_with()[0], PROMPTS, GREEDY)
    target = Target(n_ctx=2000)
    small = Target(now=target.now, cost_s=0.1, n_ctx=50)
    drafting = Drafting([ModelSource("small", small, N_VOCAB)], N_VOCAB, lambda: target.now[0])
    engine = Engine(target, make_fake_sampler, clock=lambda: target.now[0], drafting=drafting)
    assert answers(engine, PROMPTS, GREEDY)[0] == texts


@pytest.mark.parametrize("cut", range(3, 30, 4))
def test_an_end_token_ends_the_text_where_it_ends_without_drafts(cut):
    (text,), _ = answers(engine_with()[0], PROMPTS[:1], SAMPLED)
    ends = frozenset({text[cut]})
    want, _ = answers(engine_with()[0], PROMPTS[:1], SAMPLED, end_tokens=ends)
    got, (generation,) = answers(engine_with(wrong_every=4)[0], PROMPTS[:1], SAMPLED, end_tokens=ends)
    assert got == want
    assert generation.finish_reason == "stop"


def test_a_stop_string_cuts_off_what_it_cuts_off_without_drafts():
    (text,), _ = answers(engine_with()[0], PROMPTS[:1], GREEDY)
    vocabulary = FakeVocabulary()
    stop = b"".join(map(vocabulary.piece, text[30:32])).decode("latin-1")
    replies = []
    for engine, _ in (engine_with(), engine_with(wrong_every=0)):
        tokens = np.frombuffer(PROMPTS[0].encode(), np.uint8).astype(np.int32)
        reply = Reply(engine, vocabulary, tokens, GREEDY, max_tokens=60, stop=[stop])
        pieces = []
        while reply.finish_reason is None:
            pieces += reply.read()
            if reply.finish_reason is None:
                engine.step()
        replies.append(("".join(pieces), reply.finish_reason, reply.tokens))
    assert replies[0] == replies[1]


def test_a_model_that_costs_too_much_is_tried_and_left_alone():
    (text,), _ = answers(engine_with()[0], PROMPTS[:1], GREEDY, max_tokens=600)
    engine, small = engine_with(wrong_every=0, draft_s=0.9)
    drafted, _ = answers(engine, PROMPTS[:1], GREEDY, max_tokens=600)
    assert drafted == [text]
    assert small.forwards < 60


def test_a_model_that_is_always_wrong_is_tried_and_left_alone():
    (text,), _ = answers(engine_with()[0], PROMPTS[:1], GREEDY, max_tokens=600)
    engine, small = engine_with(wrong_every=1)
    drafted, (generation,) = answers(engine, PROMPTS[:1], GREEDY, max_tokens=600)
    assert drafted == [text]
    assert small.forwards < 60
    assert generation.drafted_tokens < 60
