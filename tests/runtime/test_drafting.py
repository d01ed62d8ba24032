"""With drafts, whoever makes them, every text is the one without; on a model whose text changes with any mistake."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import N_VOCAB, FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.draft import Proposal
from edgeinfer.speculation.lookup import Lookup
from edgeinfer.types import Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, seed=7, repeat_penalty=1.5, ignore_eos=True)
PROMPTS = ["a short one", "another, somewhat longer prompt " * 3, "x", "a short one too"]


def request(id, prompt, params, max_tokens=40, end_tokens=frozenset()):
    return Request(id, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), params, max_tokens, end_tokens)


class Script:
    """A source that knows how the texts go on, and may be wrong about every `wrong_every`th token."""

    name = "script"

    def __init__(self, texts=(), *, wrong_every=0, is_free=True, most=63, expected=0.9):
        self.texts = [list(text) for text in texts]
        self.wrong_every, self.is_free, self.most = wrong_every, is_free, most
        self._expected = expected
        self.closed = 0

    def expected(self, grade):
        return self._expected

    def open(self, request):
        return ScriptDraft(self)


class ScriptDraft:
    def __init__(self, source):
        self.source, self.seen = source, []

    def observe(self, tokens):
        self.seen += tokens

    def propose(self, max_tokens):
        for text in self.source.texts:
            if text[: len(self.seen)] == self.seen:
                tokens = text[len(self.seen) :][: min(max_tokens, self.source.most)]
                every = self.source.wrong_every
                first = len(self.seen)
                tokens = [(t + 1) % 256 if every and (first + i) % every == 0 else t for i, t in enumerate(tokens)]
                return Proposal("script", tuple(tokens), tuple(i % 4 for i in range(len(tokens)))) if tokens else None
        return None

    def close(self):
        self.source.closed += 1


class Clockwork(FakeBackend):
    """Time passes by its forward passes, a row more costs little: drafts pay."""

    now_s = 0.0

    def forward(self, rows):
        self.now_s += 1 + 0.05 * sum(len(row.tokens) for row in rows)
        return super().forward(rows)


def engine_with(backend, *sources, **options):
    def clock():
        return backend.now_s

    drafting = Drafting(sources, backend.n_vocab, clock) if sources else None
    return Engine(backend, make_fake_sampler, clock=clock, drafting=drafting, **options)


def run(engine, generations):
    for _ in range(10_000):
        if all(g.finish_reason for g in generations):
            return [g.tokens[g.prompt_tokens :] for g in generations]
        engine.step()
    raise AssertionError("the engine makes no progress")


def plain(prompts, params, **options):
    engine = engine_with(Clockwork(n_ctx=2000))
    return run(engine, [engine.submit(request(i, p, params, **options)) for i, p in enumerate(prompts)])


def whole(prompts, texts):
    return [[*prompt.encode(), *text] for prompt, text in zip(prompts, texts, strict=True)]


class Nonsense(Script):
    """Proposes what cannot be, or raises, by turns of the requests."""

    KINDS = ("beyond", "negative", "wrong", "no grades", "too many", "raises", "raises at open", "raises at observe")

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def open(self, request):
        if self.kind == "raises at open":
            raise RuntimeError("open")
        return NonsenseDraft(self)


class NonsenseDraft(ScriptDraft):
    def observe(self, tokens):
        if self.source.kind == "raises at observe":
            raise RuntimeError("observe")

    def propose(self, max_tokens):
        tokens = {
            "beyond": (N_VOCAB, 3),
            "negative": (5, -1, 3),
            "wrong": (1,) * max_tokens,
            "no grades": (1, 2),
            "too many": (1,) * 500,
        }
        if self.source.kind == "raises":
            raise RuntimeError("propose")
        found = tokens[self.source.kind]
        return Proposal("another name", found, () if self.source.kind == "no grades" else (0,) * len(found))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("width", [1, 4])
def test_a_text_with_drafts_is_the_text_without(params, wrong_every, is_free, width):
    texts = plain(PROMPTS, params)
    script = Script(whole(PROMPTS, texts), wrong_every=wrong_every, is_free=is_free)
    engine = engine_with(Clockwork(n_ctx=2000), script, Lookup(), limits=Limits(width))
    generations = [engine.submit(request(i, p, params)) for i, p in enumerate(PROMPTS)]
    assert run(engine, generations) == texts
    assert script.closed == len(PROMPTS)
    for generation in generations:
        assert generation.accepted_tokens <= generation.drafted_tokens
        assert generation.usage.drafted_tokens == generation.drafted_tokens
    if wrong_every == 0:
        assert sum(g.accepted_tokens for g in generations) > ((90 if is_free else 20) if width == 1 else 0)


@pytest.mark.parametrize("kind", Nonsense.KINDS)
@pytest.mark.parametrize("is_free", [True, False])
def test_a_broken_source_only_loses_its_turn(kind, is_free):
    texts = plain(PROMPTS, SAMPLED)
    broken = Nonsense(kind)
    broken.name, broken.is_free = "broken", is_free
    engine = engine_with(Clockwork(n_ctx=2000), broken, Script(whole(PROMPTS, texts)))
    generations = [engine.submit(request(i, p, SAMPLED)) for i, p in enumerate(PROMPTS)]
    assert run(engine, generations) == texts
    assert engine.drafting.use["broken"].accepted_tokens == 0
    if is_free:  # of others, one that looks too costly may never be asked
        assert engine.drafting.use["broken"].failures == (len(PROMPTS) if kind.startswith("raises") else 0)
    assert sum(g.accepted_tokens for g in generations) > 50


def test_lookup_alone_drafts_where_a_text_repeats_and_changes_nothing():
    class Parrot(Clockwork):
        """Repeats what it said eight tokens ago, mostly."""

        def _run(self, row, length):
            lines = super()._run(row, length)
            held = self.held(row.seq_id)
            first = len(held) - len(lines)
            for i, line in enumerate(lines):
                if first + i >= 8:
                    line[held[first + i - 7]] += 15
            return lines

    def answer(*sources):
        backend = Parrot(n_ctx=2000)
        engine = engine_with(backend, *sources)
        generation = engine.submit(request(0, "some words to begin with", GREEDY, max_tokens=150))
        run(engine, [generation])
        return generation, backend

    plainly, slow = answer()
    drafted, quick = answer(Lookup())
    assert drafted.tokens == plainly.tokens
    assert drafted.accepted_tokens > 75
    assert quick.forwards < slow.forwards / 2
    assert quick.now_s < 0.7 * slow.now_s


def test_what_a_rejected_draft_leaves_in_the_cache_is_nothing():
    texts = plain(PROMPTS, SAMPLED)
    backend = Clockwork(n_ctx=2000)
    engine = engine_with(backend, Script(whole(PROMPTS, texts), wrong_every=3))
    generations = [engine.submit(request(i, p, SAMPLED)) for i, p in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
        for generation in generations:
            if generation.seq_id is not None:
                assert backend.held(generation.seq_id) == generation.tokens[: generation.n_computed]
    rerun = engine.submit(request(9, PROMPTS[1], SAMPLED))
    assert run(engine, [rerun]) == [texts[1]]
    assert rerun.cached_tokens == rerun.prompt_tokens - 1


def test_memory_that_cannot_be_trimmed_gets_no_drafts():
    texts = plain(PROMPTS, SAMPLED)
    engine = engine_with(Clockwork(n_ctx=2000, can_trim=False), Script(whole(PROMPTS, texts)))
    generations = [engine.submit(request(i, p, SAMPLED)) for i, p in enumerate(PROMPTS)]
    assert run(engine, generations) == texts
    assert all(g.drafted_tokens == 0 for g in generations)
    assert not engine.drafting.is_on


def test_a_window_that_forgets_too_much_ends_the_drafts_and_changes_no_text():
    texts = plain(PROMPTS, SAMPLED)
    engine = engine_with(Clockwork(n_ctx=2000, window=20), Script(whole(PROMPTS, texts), wrong_every=5))
    generations = [engine.submit(request(i, p, SAMPLED)) for i, p in enumerate(PROMPTS)]
    assert run(engine, generations) == texts
    assert not engine.drafting.is_on
    assert max(g.drafted_tokens for g in generations) > 0


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_end_token_and_the_length_end_an_answer_in_the_middle_of_a_draft(cut):
    (text,) = plain(["some prompt"], SAMPLED)
    script = Script(whole(["some prompt"], [text]))
    ends = text.index(text[cut]) + 1
    engine = engine_with(Clockwork(), script)
    stopped = engine.submit(request(0, "some prompt", SAMPLED, end_tokens=frozenset({text[cut]})))
    assert run(engine, [stopped]) == [text[:ends]]
    assert stopped.finish_reason == "stop"
    short = engine.submit(request(1, "some prompt", SAMPLED, max_tokens=cut))
    assert run(engine, [short]) == [text[:cut]]
    assert short.finish_reason == "length"


def test_the_context_ends_an_answer_where_it_ends_without_drafts():
    params = SAMPLED
    engines = [engine_with(Clockwork(n_ctx=40))]
    (text,) = run(engines[0], [engines[0].submit(request(0, "p" * 20, params, max_tokens=1000))])
    script = Script(whole(["p" * 20], [text + [1] * 50]))
    engine = engine_with(Clockwork(n_ctx=40), script)
    generation = engine.submit(request(0, "p" * 20, params, max_tokens=1000))
    assert run(engine, [generation]) == [text]
    assert generation.finish_reason == "length"


def test_a_stop_string_cuts_off_what_the_same_step_brought_after_it():
    (text,) = plain(["some prompt"], SAMPLED)
    vocabulary = FakeVocabulary()
    stop = b"".join(map(vocabulary.piece, text[9:11])).decode("latin-1")
    replies = []
    for sources in ((), (Script(whole(["some prompt"], [text])),)):
        engine = engine_with(Clockwork(), *sources)
        tokens = np.frombuffer(b"some prompt", np.uint8).astype(np.int32)
        reply = Reply(engine, vocabulary, tokens, SAMPLED, max_tokens=40, stop=[stop])
        pieces = []
        while reply.finish_reason is None:
            pieces += reply.read()
            if reply.finish_reason is None:
                engine.step()
        replies.append(("".join(pieces), reply.finish_reason, reply.tokens, reply.generation.usage.completion_tokens))
    assert replies[0] == replies[1]


def test_an_interrupt_in_a_step_with_a_draft_keeps_what_was_accepted():
    texts = plain(PROMPTS, SAMPLED)
    backend = Clockwork(n_ctx=2000)
    engine = engine_with(backend, Script(whole(PROMPTS, texts)))
    generation = engine.submit(request(1, PROMPTS[1], SAMPLED))
    while generation.accepted_tokens == 0:
        engine.step()
    said = list(generation.tokens)
    assert generation.finish_reason is None
    backend.abort()
    engine.step()
    assert generation.finish_reason == "interrupted"
    assert generation.tokens == said
    again = engine.submit(request(1, PROMPTS[1], SAMPLED))
    assert run(engine, [again]) == [texts[1]]


def test_a_source_that_does_not_pay_is_off_within_32_tokens_and_tried_again_rarely():
    (text,) = plain(["some prompt"], SAMPLED, max_tokens=600)
    for is_free in (True, False):
        script = Script(whole(["some prompt"], [text]), wrong_every=1, is_free=is_free)
        engine = engine_with(Clockwork(n_ctx=2000), script)
        generation = engine.submit(request(0, "some prompt", SAMPLED, max_tokens=600))
        while generation.n_answered < 32:
            engine.step()
        early = generation.drafted_tokens
        run(engine, [generation])
        assert generation.drafted_tokens - early <= 10


def test_a_draft_ends_with_the_room_of_the_cache():
    texts = plain(["p" * 30, "q" * 30], SAMPLED, max_tokens=60)
    engine = engine_with(Clockwork(n_ctx=100), Script(whole(["p" * 30, "q" * 30], texts)))
    generations = [engine.submit(request(i, p, SAMPLED, max_tokens=60)) for i, p in enumerate(["p" * 30, "q" * 30])]
    assert run(engine, generations) == texts


def test_the_scheduler_counts_the_rows_of_drafts():
    class Widest(Clockwork):
        widest = 0

        def forward(self, rows):
            self.widest = max(self.widest, sum(len(row.tokens) for row in rows))
            return super().forward(rows)

    texts = plain(PROMPTS, SAMPLED)
    backend = Widest(n_ctx=2000)
    engine = engine_with(backend, Script(whole(PROMPTS, texts)), limits=Limits(4, max_step_tokens=16))
    generations = [engine.submit(request(i, p, SAMPLED)) for i, p in enumerate(PROMPTS)]
    assert run(engine, generations) == texts
    assert backend.widest == 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=25), st.integers(1, 25), st.integers(0, 3), st.integers(0, 30)),
        min_size=1,
        max_size=5,
    ),
    st.integers(90, 200),
    st.integers(1, 4),
    st.integers(8, 64),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([GREEDY, SAMPLED]),
)
def test_whatever_else_happens_every_text_is_the_one_without_drafts(workload, n_ctx, width, batch, wrong, free, params):
    texts = [plain([prompt], params, max_tokens=n)[0] for prompt, n, *_ in workload]
    script = Script(whole([prompt for prompt, *_ in workload], texts), wrong_every=wrong, is_free=free)
    backend = Clockwork(n_ctx=n_ctx, max_sequences=width + 1, max_batch_tokens=batch)
    engine = engine_with(backend, script, Lookup(), limits=Limits(width))
    generations = {}
    for step in itertools.count():
        assert step < 3000
        for i, (prompt, max_tokens, priority, arrives) in enumerate(workload):
            if arrives == step:
                made = request(i, prompt, params, max_tokens=max_tokens)
                generations[i] = engine.submit(Request(i, made.tokens, params, max_tokens, priority=priority))
        if len(generations) == len(workload) and not engine.has_work:
            break
        engine.step()
    assert [generations[i].tokens[generations[i].prompt_tokens :] for i in range(len(workload))] == texts
    tree = engine._residency._tree
    assert tree.n_referenced == 0
    for seq_id in range(width + 1):
        assert backend.held(seq_id) == (tree.tokens(seq_id) if seq_id in tree else [])
    assert tree.n_cells == backend._used_cells


def test_drafts_do_not_stretch_the_steps_of_others():
    """Four answers with sure drafts: no step takes more than the target, with a prompt in it or not."""
    texts = plain(PROMPTS, SAMPLED, max_tokens=400)

    class Timed(Clockwork):
        """A row more costs a fifth of the first."""

        def forward(self, rows):
            self.now_s -= 0.05 * sum(len(row.tokens) for row in rows)
            self.now_s += 0.2 * sum(len(row.tokens) for row in rows)
            return super().forward(rows)

    backend = Timed(n_ctx=4000, max_sequences=5, max_batch_tokens=512)
    engine = engine_with(backend, Script(whole(PROMPTS, texts)), limits=Limits(5))
    generations = [engine.submit(request(i, p, SAMPLED, max_tokens=400)) for i, p in enumerate(PROMPTS)]
    long = None
    steps = []
    while engine.has_work:
        if long is None and min(g.n_answered for g in generations) > 100:
            long = engine.submit(request(9, "q" * 300, SAMPLED, max_tokens=2))
        decoding = [g for g in generations if g.n_answered and not g.finish_reason]
        before_s = backend.now_s
        engine.step()
        if len(decoding) == 4:
            steps.append((backend.now_s - before_s) / (1 + 0.2 * 4))
    assert [g.tokens[g.prompt_tokens :] for g in generations] == texts
    assert max(steps[5:]) < 3
    assert sum(g.accepted_tokens for g in generations) > 100
