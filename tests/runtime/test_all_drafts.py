"""Every source of drafts at once, while requests come, wait, are cancelled and end: no text changes, no cell stays."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.draft import Proposal
from edgeinfer.speculation.edit import Edit
from edgeinfer.speculation.lookup import Lookup
from edgeinfer.speculation.memory import Memory
from edgeinfer.speculation.model import ModelSource
from edgeinfer.types import Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, seed=7, repeat_penalty=1.2, ignore_eos=True)
PERIOD = 23


class Copyist(FakeBackend):
    """Writes again what stood `PERIOD` tokens ago, with a change now and then; rows cost little."""

    now_s = 0.0

    def forward(self, rows):
        self.now_s += 1 + 0.05 * sum(len(row.tokens) for row in rows)
        return super().forward(rows)

    def _run(self, row, length):
        lines = super()._run(row, length)
        held = self.held(row.seq_id)
        first = len(held) - len(lines)
        for i, line in enumerate(lines):
            place = first + i + 1 - PERIOD
            if place >= 0 and (first + i) % 17:
                line[held[place]] += 12
        return lines


class Broken:
    """Raises by turns, proposes what is wrong, what is no token, and the same for ever."""

    name = "broken"
    is_free = True

    def __init__(self):
        self.calls = 0

    def expected(self, grade):
        return 0.99

    def open(self, request):
        self.calls += 1
        if self.calls % 5 == 0:
            raise RuntimeError("open")
        return self

    def observe(self, tokens):
        self.calls += 1
        if self.calls % 31 == 0:
            raise RuntimeError("observe")

    def propose(self, max_tokens):
        self.calls += 1
        if self.calls % 29 == 0:
            raise RuntimeError("propose")
        tokens = ((1,) * max_tokens, (-1,), (10**9, 1), (1, 2, 3) * 500, ())[self.calls % 5]
        return Proposal("broken", tokens, (0,) * len(tokens))

    def close(self):
        raise RuntimeError("close")


def engine_with(backend, sources, **options):
    drafting = Drafting(sources, backend.n_vocab, lambda: backend.now_s) if sources else None
    return Engine(backend, make_fake_sampler, clock=lambda: backend.now_s, drafting=drafting, **options)


def request(id, prompt, params, max_tokens, priority=0):
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    return Request(id, tokens, params, max_tokens, priority=priority)


def plain(prompt, params, max_tokens):
    engine = engine_with(Copyist(n_ctx=2000), ())
    generation = engine.submit(request(0, prompt, params, max_tokens))
    while engine.has_work:
        engine.step()
    return generation.tokens[generation.prompt_tokens :]


def all_sources(memory):
    guesser = Copyist(n_ctx=400, max_sequences=2, max_batch_tokens=64)
    return [Lookup(), Edit(), memory, Broken(), ModelSource("guesser", guesser, guesser.n_vocab)]


ROW = st.tuples(
    st.text("abc", min_size=1, max_size=30),
    st.integers(1, 70),
    st.integers(0, 3),
    st.integers(0, 30),
    st.none() | st.integers(0, 40),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=5),
    st.integers(110, 300),
    st.integers(1, 4),
    st.integers(8, 64),
    st.sampled_from([GREEDY, SAMPLED]),
)
def test_every_text_is_the_one_without_drafts(workload, n_ctx, width, batch, params):
    texts = [plain(prompt, params, n) for prompt, n, *_ in workload]
    backend = Copyist(n_ctx=n_ctx, max_sequences=width + 1, max_batch_tokens=batch)
    engine = engine_with(backend, all_sources(Memory(texts[::2])), limits=Limits(width))
    generations = {}
    for step in itertools.count():
        assert step < 3000
        for i, (prompt, max_tokens, priority, arrives, cancelled) in enumerate(workload):
            if arrives == step:
                generations[i] = engine.submit(request(i, prompt, params, max_tokens, priority))
            if cancelled is not None and step == arrives + cancelled + 1:
                engine.cancel(i)
        if len(generations) == len(workload) and not engine.has_work:
            break
        engine.step()
    for i, text in enumerate(texts):
        written = generations[i].tokens[generations[i].prompt_tokens :]
        assert written == (text[: len(written)] if generations[i].finish_reason == "interrupted" else text)
    tree = engine._residency._tree
    assert tree.n_referenced == 0
    for seq_id in range(width + 1):
        assert backend.held(seq_id) == (tree.tokens(seq_id) if seq_id in tree else [])
    assert tree.n_cells == backend._used_cells
    assert not engine.drafting._followed


def test_every_source_has_its_part():
    memory = Memory()
    backend = Copyist(n_ctx=2000)
    engine = engine_with(backend, all_sources(memory))
    for params in (GREEDY, GREEDY, SAMPLED):
        generation = engine.submit(request(0, "a text of some length, to be written again", params, 300))
        while engine.has_work:
            engine.step()
        assert generation.tokens[generation.prompt_tokens :] == plain(
            "a text of some length, to be written again", params, 300
        )
    use = engine.drafting.use
    assert use["lookup"].accepted_tokens > 0
    assert use["edit"].accepted_tokens > 0
    assert use["memory"].accepted_tokens > 0
    assert use["broken"].accepted_tokens == 0
    assert use["broken"].failures > 0
    assert len(memory.answers) == 2  # of the same answer one


@settings(max_examples=25, deadline=None)
@given(st.integers(20, 75), st.integers(1, 4), st.sampled_from([GREEDY, SAMPLED]))
def test_a_stop_string_over_the_border_of_a_draft_cuts_off_the_same(start, length, params):
    prompt = "a text of some length, to be written again"
    text = plain(prompt, params, 80)
    vocabulary = FakeVocabulary()
    stop = b"".join(map(vocabulary.piece, text[start : start + length])).decode("latin-1")
    replies = []
    for sources in ((), all_sources(Memory([text]))):
        engine = engine_with(Copyist(n_ctx=2000), sources)
        tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
        reply = Reply(engine, vocabulary, tokens, params, max_tokens=80, stop=[stop])
        pieces = []
        while reply.finish_reason is None:
            pieces += reply.read()
            if reply.finish_reason is None:
                engine.step()
        replies.append(("".join(pieces), reply.finish_reason, reply.tokens, reply.generation.usage.completion_tokens))
    assert replies[0] == replies[1]
