"""Answers that are held to a grammar, and probabilities, through the engine."""

import json
import math

import jsonschema
import numpy as np
import pytest
from grammar_parts import LEXICON, of_gbnf, of_schema, schemas
from hypothesis import given, settings

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.grammar.constraint import Lexicon, TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import About, AnswerStream, Reply
from edgeinfer.runtime.constrained import ConstrainedSampler
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import EOS, FakeBackend, FakeSampler, FakeVocabulary, make_fake_sampler
from edgeinfer.runtime.prompt import raw_tokens
from edgeinfer.runtime.recording import logprobs_of

VOCABULARY = FakeVocabulary()


class Hasty(FakeSampler):
    """Likes what ends a text of JSON, so that random answers end."""

    def sample(self, logits):
        liked = logits.copy()
        liked[list(b'"]},:0')] += 5
        return super().sample(liked)


def engine(make_sampler=make_fake_sampler):
    return Engine(FakeBackend(n_ctx=3000, max_batch_tokens=512), make_sampler)


def answer(grammar, *, work=None, max_tokens=600, seed=3, ignore_eos=False, **options):
    params = SamplingParams(temperature=1, seed=seed, ignore_eos=ignore_eos)
    constraint = grammar.constraint() if grammar else None
    prompt = raw_tokens(VOCABULARY, "hello")
    reply = Reply(work or engine(), VOCABULARY, prompt, params, max_tokens=max_tokens, constraint=constraint, **options)
    stream = AnswerStream(reply._engine, reply, About("m.gguf", "fake", 1.0))
    text = "".join(stream)
    assert stream.answer.text == text
    return stream.answer


def test_a_grammar_that_is_complete_ends_the_answer():
    found = answer(of_gbnf('root ::= "yes" | "no"'))
    assert found.text in ("yes", "no")
    assert found.finish_reason == "schema"


def test_where_more_could_follow_the_model_decides():
    found = answer(of_gbnf("root ::= [0-9]+"), seed=5)
    assert found.finish_reason == "stop"
    assert found.text.isdigit()
    assert answer(of_gbnf("root ::= [0-9]+"), max_tokens=4, ignore_eos=True).finish_reason == "length"


def test_the_last_token_that_is_allowed_completes_it_too():
    assert answer(of_gbnf('root ::= "abc"'), max_tokens=3).finish_reason == "schema"


def test_a_seed_gives_the_same_answer_alone_and_together():
    grammar = of_schema({"type": "array", "items": {"type": "integer"}})
    alone = [answer(grammar, work=engine(Hasty), seed=seed).text for seed in range(4)]
    assert len(set(alone)) > 1
    work = engine(Hasty)
    replies = [
        Reply(
            work,
            VOCABULARY,
            raw_tokens(VOCABULARY, "hello"),
            SamplingParams(temperature=1, seed=seed),
            max_tokens=600,
            constraint=grammar.constraint(),
        )
        for seed in range(4)
    ]
    texts = ["" for _ in replies]
    while work.has_work:
        work.step()
        for i, reply in enumerate(replies):
            texts[i] += "".join(reply.read()) if reply.finish_reason is None else ""
    assert texts == alone


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schemas())
def test_every_finished_answer_is_valid(schema):
    try:
        grammar = of_schema(schema)
    except UnusableInputError:
        return
    found = answer(grammar, work=engine(Hasty), max_tokens=400)
    if found.finish_reason != "length":
        assert found.finish_reason in ("stop", "schema")
        jsonschema.Draft202012Validator(schema).validate(json.loads(found.text))


def test_a_token_that_is_allowed_is_taken_without_a_mask():
    class Counting:
        is_complete = False
        asked = 0

        def allows(self, token):
            return token != 7

        def allowed(self):
            self.asked += 1
            return np.arange(10) != 7

        def accept(self, token):
            pass

    constraint, logits = Counting(), np.zeros(10, np.float32)
    sampler = ConstrainedSampler(FakeSampler(SamplingParams(temperature=0)), constraint)
    logits[3] = 1
    assert (sampler.sample(logits), constraint.asked) == (3, 0)
    logits[7] = 2
    assert (sampler.sample(logits), constraint.asked) == (3, 1)


def test_a_stop_string_and_a_grammar_exclude_each_other():
    with pytest.raises(UsageError, match="stop string"):
        answer(of_gbnf('root ::= "a"'), stop=["x"])


def test_a_vocabulary_that_cannot_spell_it_is_an_error():
    class Letters(FakeVocabulary):
        def piece(self, token, *, special=False):
            return b"" if token == ord("z") else super().piece(token, special=special)

    grammar = TokenGrammar(parse_gbnf('root ::= "az"'), Lexicon(Letters()))
    with pytest.raises(UnusableInputError, match="no token of the vocabulary"):
        answer(grammar)


def test_what_is_forbidden_and_asked_for_is_an_error():
    class Stubborn(FakeSampler):
        def sample(self, logits):
            return EOS

    with pytest.raises(UsageError, match="forbids all"):
        answer(of_gbnf('root ::= "a"'), work=engine(Stubborn))


def test_every_token_has_its_probability():
    found = answer(None, max_tokens=12, logprobs=3)
    assert len(found.logprobs) == found.usage.completion_tokens
    for entry in found.logprobs:
        assert list(entry) == ["id", "piece", "logprob", "top"]
        assert entry["logprob"] <= 0
        top = [t["logprob"] for t in entry["top"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert all(t["logprob"] == entry["logprob"] for t in entry["top"] if t["id"] == entry["id"])
    assert answer(None, max_tokens=12).text == found.text
    assert answer(None, max_tokens=2).logprobs is None


def test_probabilities_are_the_model_s_own_also_under_a_grammar():
    found = answer(of_gbnf('root ::= "abc"'), logprobs=0)
    assert [entry["piece"] for entry in found.logprobs] == ["a", "b", "c"]
    assert all(entry["logprob"] < 0 and entry["top"] == [] for entry in found.logprobs)


def test_probabilities_are_those_of_a_softmax():
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 700.0], np.float32)
    found = logprobs_of(logits, 1, 4)
    assert found.logprob == pytest.approx(3 - 700)
    assert [token for token, _ in found.top] == [4, 1, 2, 0]
    assert sum(math.exp(p) for _, p in logprobs_of(np.arange(5, dtype=np.float32), 0, 99).top) == pytest.approx(1)


@pytest.mark.parametrize("n", [-1, 101])
def test_so_many_are_too_many(n):
    with pytest.raises(UsageError, match=f"logprobs is {n}"):
        answer(None, logprobs=n)


def test_the_lexicon_is_shared():
    assert LEXICON.tree is LEXICON.tree
