"""llama.cpp's grammar notation, followed byte by byte, and the masks over a vocabulary."""

import random

import numpy as np
import pytest
from grammar_parts import LEXICON, of_gbnf, of_schema, standing

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.grammar import automaton
from edgeinfer.grammar.constraint import Lexicon, TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.grammar.json_schema.compiler import compile_schema
from edgeinfer.grammar.utf8 import byte_spans
from edgeinfer.runtime.fake import FakeVocabulary

LIST = 'root ::= "- " item ("\\n- " item)* # a list\nitem ::= [a-z]+\n    | "\\"" [^"\\n]* "\\""\n'
NESTED = 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"'


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (
            'root ::= "yes" | "no" [.!]{1,3}',
            {"yes": "complete", "no": "more", "no.": "end", "no.!.": "complete", "n!": "dead"},
        ),
        (LIST, {"- a": "end", '- "é😀"\n- b': "end", "- a\n": "more", "-a": "dead", '- "\n': "dead"}),
        (NESTED, {"1+(2-3)": "end", "((1": "more", "1+": "more", ")": "dead", "(1))": "dead"}),
        ('root ::= "a" root "b" | "a" root "c" | ""', {"": "end", "aabc": "complete", "aab": "more", "ab": "complete"}),
        ('root ::= (x?){3} "b"\nx ::= "a"', {"b": "complete", "aaab": "complete", "aaaa": "dead"}),
        ('root ::= x{3,} "b"\nx ::= "a" | "aa"', {"aab": "dead", "aaab": "complete", "a" * 99 + "b": "complete"}),
        ('root ::= ("ab" | "c"){3,20}', {"abc": "more", "abcab": "end", "c" * 20: "complete", "c" * 21: "dead"}),
        ('root ::= (("a"*)*)* "b"', {"b": "complete", "a" * 500 + "b": "complete"}),
        ("root ::= | x\nx ::= [x] x | [x]", {"": "end", "x" * 500: "end"}),
        (
            "root ::= .",
            {"\n": "complete", "\U0010ffff": "complete", b"\xed\xa0\x80": "dead", b"\xff": "dead", b"\xc3": "more"},
        ),
        (r'root ::= "\x41\u00e9\U0001F600\t" [\]\-\^\\] [a-]', {"Aé😀\t]-": "complete", "Aé😀\t\\a": "complete"}),
        ('root ::= ""', {"": "complete"}),
        ('root ::= "a"{0}', {"": "complete", "a": "dead"}),
        ("root ::= [a]{1000000}", {"a" * 2000: "more"}),
    ],
)
def test_texts_and_where_they_stand(source, texts):
    grammar = of_gbnf(source)
    assert {text: standing(grammar, text) for text in texts} == texts


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "there is no rule 'root'"),
        ('x ::= "a"', "there is no rule 'root'"),
        ("root ::= y", "line 1: there is no rule 'y'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there are two rules 'root'"),
        ('root ::= "a', "line 1: a literal or a class that does not end"),
        ("root ::= [a", "does not end"),
        ("root ::= []", "without characters"),
        ("root ::= [z-a]", "backwards"),
        ("root ::= (", "')' is missing"),
        ("root ::= )", "unexpected ')'"),
        ("root = x", "no ::="),
        ('root ::= "a"{3,1}', "{3,1} is no range"),
        ('root ::= "a"{9999999}', "is no range"),
        ('root ::= "a"{x}', "braces"),
        (r'root ::= "\q"', r"the escape \q is not known"),
        (r'root ::= "\ud800"', "without the number of a character"),
        ("root ::= <think>", "tokens of a vocabulary"),
        ('root ::= root "a" | "b"', "the rule 'root' begins with itself"),
        ('root ::= x "a"\nx ::= y? root | "d"\ny ::= "c"', "begins with itself"),
        ('root ::= root{2} | "a"', "begins with itself"),
        ('root ::= "a" root', "no text matches it"),
        ("root ::= root", "no text matches it"),
        ('root ::= "\ud800"', "not valid Unicode"),
    ],
)
def test_what_is_no_grammar_is_told_with_its_line(source, says):
    with pytest.raises(UnusableInputError) as error:
        of_gbnf(source)
    assert says in error.value.message


class Words(FakeVocabulary):
    """Random pieces besides the bytes: long ones, equal ones, halves of characters, ones that end a text of JSON."""

    def __init__(self, seed):
        rng = random.Random(seed)
        parts = [
            b"a",
            b'"',
            b"{",
            b"}",
            b", ",
            b"\xc3",
            b"\xa9",
            b" ",
            b"\n",
            b'":',
            b"1",
            "😀".encode(),
            b"\0",
            b"null",
        ]
        more = [b"".join(rng.choices(parts, k=rng.randint(1, 40))) for _ in range(3000)]
        self._pieces = [*FakeVocabulary().pieces(), *more, *more[:5], b"", b"a" * 2000]
        self.n_tokens = len(self._pieces)

    def piece(self, token, *, special=False):
        return self._pieces[token]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "schema", [True, {"type": "array", "items": {"enum": [1, None, "a", "aé😀"]}}, {"type": "string"}]
)
def test_a_mask_is_what_every_token_alone_would_be_told(seed, schema):
    grammar = TokenGrammar(compile_schema(schema), Lexicon(Words(seed)))
    constraint, rng = grammar.constraint(), random.Random(seed)
    for _ in range(12):
        if constraint.is_complete:
            break
        allowed = constraint.allowed()
        alone = [constraint.allows(token) for token in range(len(allowed))]
        assert list(constraint.allowed_of(range(len(allowed)))) == np.flatnonzero(alone).tolist()
        alone[-1] = False  # longer than masks look
        assert allowed.tolist() == alone
        token = int(rng.choice(np.flatnonzero(allowed)))
        if token in FakeVocabulary.end_tokens:
            break
        constraint.accept(token)


def test_a_table_that_is_begun_anew_changes_nothing(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_CELLS", 2000)
    grammar = of_schema({"type": "array", "items": {"type": "array", "items": {"type": "string", "maxLength": 30}}})
    constraints = [grammar.constraint() for _ in range(3)]
    for token in b'[["abc", "' + b"x" * 30 + b'"],["y"], []]':
        for constraint in constraints:
            allowed = constraint.allowed()
            assert allowed[token]
            assert not allowed[0]
            constraint.accept(token)
    assert [c.is_complete for c in constraints] == [True] * 3


def test_nothing_is_allowed_that_nothing_can_follow():
    grammar = of_gbnf('root ::= pair endless | "z"\npair ::= "xx"\nendless ::= "q" endless')
    assert np.flatnonzero(grammar.constraint().allowed()).tolist() == [ord("z")]
    assert standing(grammar, "x") == "dead"


def test_answers_of_one_grammar_do_not_know_each_other():
    grammar = of_gbnf('root ::= "a" "b"')
    one, other = grammar.constraint(), grammar.constraint()
    one.accept(ord("a"))
    assert (one.allows(ord("b")), other.allows(ord("b")), other.allows(ord("a"))) == (True, False, True)
    one.accept(ord("b"))
    assert (one.is_complete, other.is_complete) == (True, False)
    with pytest.raises(UsageError, match="does not match"):
        other.accept(ord("b"))


def test_an_ambiguous_grammar_ends_in_an_error_and_not_in_a_long_wait():
    grammar = TokenGrammar(parse_gbnf('root ::= ((("a"{0,99}){0,99}){0,99}){0,99}'), LEXICON)
    constraint = grammar.constraint()

    def follow():
        for _ in range(99):
            constraint.accept(ord("a"))

    with pytest.raises(UnusableInputError, match="too ambiguous"):
        follow()


def test_looking_at_many_tokens_has_one_limit(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_WORK", 500)
    vocabulary = Words(0)

    def constraint():
        begun = TokenGrammar(compile_schema({"type": "string", "maxLength": 300}), Lexicon(vocabulary)).constraint()
        begun.accept(ord('"'))
        return begun

    assert all(isinstance(constraint().allows(token), bool) for token in range(300))
    with pytest.raises(UnusableInputError, match="too ambiguous"):
        list(constraint().allowed_of(range(vocabulary.n_tokens)))


def test_byte_spans_are_the_encodings_and_nothing_else():
    for first, last in [(0, 0x7F), (0x41, 0x41), (0x70, 0x90), (0x7FF, 0x801), (0xE000, 0x10FFFF), (0x3A9, 0x20AC)]:
        spans = list(byte_spans(first, last))
        for code in {first, last, (first + last) // 2, first - 1, last + 1} - {-1, 0x110000, 0xDFFF}:
            data = chr(code).encode()
            n_matching = sum(
                len(span) == len(data) and all(a <= b <= z for (a, z), b in zip(span, data, strict=True))
                for span in spans
            )
            assert n_matching == (first <= code <= last)
