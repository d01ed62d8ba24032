"""With drafts from a grammar every text and every probability is the one without; what is forced is drafted right."""

import numpy as np
import pytest
from grammar_parts import of_gbnf, of_schema, schemas
from hypothesis import given, settings

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.constraint import Lexicon, TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeSampler, FakeVocabulary
from edgeinfer.runtime.prompt import raw_tokens
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.grammar import Structure
from edgeinfer.speculation.lookup import Lookup
from edgeinfer.types import Request

VOCABULARY = FakeVocabulary()
RECORDS = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"first_name": {"enum": ["Ann", "Bo"]}, "born": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["first_name", "born"],
    },
}
GREEDY = SamplingParams(temperature=0)
PENALIZED = SamplingParams(temperature=0.7, seed=5, repeat_penalty=1.5)


class Hasty(FakeSampler):
    """Likes what ends a text of JSON, so that random answers end."""

    def sample(self, logits):
        liked = logits.copy()
        liked[list(b'"]},:0')] += 5
        return super().sample(liked)


class Clockwork(FakeBackend):
    """Time passes by its forward passes, a row more costs little: drafts pay."""

    now_s = 0.0

    def forward(self, rows):
        self.now_s += 1 + 0.05 * sum(len(row.tokens) for row in rows)
        return super().forward(rows)


def engine_with(*sources, width=4):
    backend = Clockwork(n_ctx=4000, max_batch_tokens=512)

    def clock():
        return backend.now_s

    drafting = Drafting(sources, backend.n_vocab, clock)
    return Engine(backend, Hasty, clock=clock, drafting=drafting, limits=Limits(width))


def answers(engine, grammars, params, **options):
    """The tokens, ends, probabilities and uses of an answer for each grammar, one of which may be None."""
    replies = [
        Reply(
            engine,
            VOCABULARY,
            raw_tokens(VOCABULARY, f"prompt {i}"),
            params,
            max_tokens=150,
            constraint=grammar and grammar.constraint(),
            stop=["a", "e"] if grammar is None else (),
            logprobs=1,
            **options,
        )
        for i, grammar in enumerate(grammars)
    ]
    texts = [""] * len(replies)
    while True:
        for i, reply in enumerate(replies):
            texts[i] += "".join(reply.read()) if reply.finish_reason is None else ""
        if not engine.has_work:
            break
        engine.step()
    told = [(text, r.tokens, r.finish_reason, r.logprobs()) for text, r in zip(texts, replies, strict=True)]
    return told, [reply.generation.usage for reply in replies]


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, *(SamplingParams(temperature=1, seed=s) for s in range(3))])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("sources", [(Structure(),), (Structure(), Lookup())], ids=len)
def test_an_answer_with_drafts_from_its_grammar_is_the_one_without(params, width, sources):
    def grammars():
        return [of_schema(RECORDS), None, of_gbnf('root ::= ("yes " | "no, never! ")+'), of_schema({"type": "object"})]

    plain, _ = answers(engine_with(width=width), grammars(), params)
    engine = engine_with(*sources, width=width)
    drafted, usages = answers(engine, grammars(), params)
    assert drafted == plain
    use = engine.drafting.use["grammar"]
    assert use.failures == 0
    assert use.accepted_tokens > 20
    assert usages[0].accepted_tokens > 10
    if sources[0] is sources[-1]:
        assert usages[1].drafted_tokens == 0  # an answer that is held to nothing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schemas())
def test_so_it_is_with_any_schema(schema):
    try:
        grammar = of_schema(schema)
    except UnusableInputError:
        return
    params = SamplingParams(temperature=1, seed=3)
    plain, _ = answers(engine_with(), [grammar], params)
    engine = engine_with(Structure(), Lookup())
    assert answers(engine, [grammar], params)[0] == plain
    assert engine.drafting.use["grammar"].failures == 0


def test_what_is_remembered_of_an_answer_is_bounded_and_the_newest(monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.grammar._MAX_CHOICES", 12)
    constraint = of_schema({"type": "string"}).constraint()
    request = Request(1, raw_tokens(VOCABULARY, "x"), GREEDY, 200, constraint=constraint)
    draft = Structure().open(request)
    draft.observe([])
    draft.observe(list(b'"' + b"abc" * 50))
    assert len(draft._choices) <= 12
    assert bytes(draft.propose(3).tokens) == b"abc"


def after(grammar, text):
    constraint = grammar.constraint()
    for token in text.encode():
        constraint.accept(token)
    return constraint


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", "["),
        ('[{"', 'first_name":'),
        ('[{"first_name": ', '"'),
        ('[{"first_name": "', ""),
        ('[{"first_name": "B', 'o",'),
        ('[{"first_name":"Bo","born":', ""),
    ],
)
def test_what_leaves_no_choice_is_forced(text, forced):
    assert bytes(after(of_schema(RECORDS), text).forced()).decode() == forced


def test_nothing_is_forced_where_an_answer_may_end():
    grammar = of_gbnf('root ::= "ab" "c"?')
    assert after(grammar, "").forced() == (97, 98)
    assert after(grammar, "ab").forced() == after(grammar, "abc").forced() == ()


def test_a_place_is_the_same_in_every_record_and_another_in_every_property():
    grammar = of_schema({"type": "array", "maxItems": 9, "items": {"required": ["a", "b"]}})
    first, second = after(grammar, '[{"a": 1, "b'), after(grammar, '[{"a":2,"b":3},{"a":4,"b')
    assert first.place == second.place
    assert first.place != after(grammar, '[{"a').place


def test_a_copy_goes_on_by_itself():
    constraint = after(of_gbnf('root ::= "ab"'), "a")
    constraint.copy().accept(ord("b"))
    assert not constraint.is_complete
    assert constraint.allows(ord("b"))


def test_a_forced_text_is_cut_as_the_tokenizer_cuts_it_and_never_across_the_border():
    class Pairs(FakeVocabulary):
        """`bc` is a token of its own, and the tokenizer puts a blank in front of a text, as SentencePiece does."""

        def piece(self, token, *, special=False):
            return b"bc" if token == 0 else super().piece(token, special=special)

        def tokenize(self, text, *, add_special, parse_special):
            return np.array(list((" " + text).encode().replace(b"bc", b"\0")), np.int32)

    def forced(source, text):
        return after(TokenGrammar(parse_gbnf(source), Lexicon(Pairs())), text).forced()

    assert forced('root ::= "abcd"', "") == (97, 0, 100)
    assert forced('root ::= "abcd"', "a") == (0, 100)
    assert forced('root ::= "abcd"', "ab") == (99, 100)
    assert forced('root ::= "aé" [bc]', "a") == (0xC3, 0xA9)


def test_a_character_that_has_begun_is_not_tokenized():
    constraint = of_gbnf('root ::= "é"').constraint()
    constraint.accept(0xC3)
    assert constraint.forced() in ((), (0xA9,))


def test_the_second_record_is_drafted_as_the_first_was_written():
    text = '[ {"first_name":"Bo", "born": 7},\n {"'
    constraint = of_schema(RECORDS).constraint()
    request = Request(0, np.array([1], np.int32), GREEDY, 99, constraint=constraint)
    draft = Structure().open(request)
    draft.observe([1])
    for token in text.encode():
        constraint.accept(token)
        draft.observe([token])
    drafted = bytes(draft.propose(63).tokens)  # as long as it is likely enough
    assert b'first_name":"Bo", "born": 7}'.startswith(drafted)
    assert len(drafted) >= 13
    assert Structure().open(Request(0, np.array([1], np.int32), GREEDY, 99)) is None
