"""Schemas and grammars that want to end or to hang the process: each is refused in one line, or works, and soon."""

import json
import time

import numpy as np
import pytest
from grammar_parts import LEXICON

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.constraint import TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.grammar.json_schema.compiler import parse_schema

MAX_S = 10  # on a machine that does something else too


def nested(levels, inner="{}", before='{"items":', after="}"):
    return before * levels + inner + after * levels


def doubling(levels, combine="allOf"):
    defs = {f"d{i}": {combine: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return json.dumps({"$defs": {**defs, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


PLANES = {f"plane {plane}": chr(plane * 0x10000 + 0xFFF0) for plane in range(17)}

SCHEMAS = {
    "maxLength": '{"type": "string", "maxLength": 5000}',
    "maxLength beyond all": '{"type": "string", "maxLength": 1e300}',
    "minLength beyond all": '{"type": "string", "minLength": 10000000000000000000}',
    "maxItems": '{"type": "array", "maxItems": 1000000000, "items": {"maxLength": 99999999, "type": "string"}}',
    "minItems": '{"type": "array", "minItems": 1000000000, "items": {"type": "array", "minItems": 1000000000}}',
    "items in items 60": nested(60),
    "items in items 500": nested(500),
    "items in items 100000": nested(100_000),
    "anyOf in anyOf 50": nested(50, "{}", '{"anyOf":[', "]}"),
    "anyOf in anyOf 400": nested(400, "{}", '{"anyOf":[', "]}"),
    "allOf in allOf 400": nested(400, "{}", '{"allOf":[', "]}"),
    "oneOf in oneOf 90": nested(90, "{}", '{"oneOf":[', "]}"),
    "properties in properties 400": nested(400, "{}", '{"properties":{"a":', "}}"),
    "arrays in an enum": '{"enum": [' + "[" * 900 + "]" * 900 + "]}",
    "a circle": '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    "a circle beside keywords": '{"$defs": {"a": {"$ref": "#/$defs/a", "minLength": 1}}, "$ref": "#/$defs/a"}',
    "a circle of allOf": '{"allOf": [{"$ref": "#"}, {"type": "object"}]}',
    "a circle of anyOf": '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "null"}]}',
    "a circle of oneOf": '{"oneOf": [{"$ref": "#"}, {"type": "null"}]}',
    "a long chain": json.dumps(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {}}, "$ref": "#/$defs/d0"}
    ),
    "doubling by allOf": doubling(40),
    "doubling by anyOf": doubling(40, "anyOf"),
    "doubling by oneOf": doubling(12, "oneOf"),
    "a product of anyOf": json.dumps({"allOf": [{"anyOf": [{"minimum": i} for i in range(20)]}] * 6}),
    "many branches of oneOf": json.dumps({"oneOf": [{"const": i} for i in range(300)]}),
    "a large enum": json.dumps({"enum": [f"word number {i}" for i in range(20_000)]}),
    "an enum of long texts": json.dumps({"enum": ["x" * 50_000 + str(i) for i in range(4)]}),
    "an enum that is too large": json.dumps({"enum": ["x" * 1_000_000]}),
    "many properties": json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(3000)}}),
    "too many properties": json.dumps(
        {"properties": {f"p{i}": {"maxLength": 3, "type": "string"} for i in range(20_000)}}
    ),
    "many keys to avoid": json.dumps({"properties": {f"p{i}": {} for i in range(2000)}, "additionalProperties": True}),
    "a long key": json.dumps({"properties": {"k" * 20_000: {}}, "additionalProperties": True}),
    "a schema that is too long": '{"title": "' + "x" * 2_000_000 + '"}',
    "a large number": '{"type": "integer", "minimum": 1' + "0" * 3000 + "}",
    "a number beyond Python": '{"type": "integer", "minimum": 1' + "0" * 10_000 + "}",
    "a double beyond all": '{"type": "number", "maximum": 1e999}',
    "a small number": '{"type": "number", "minimum": 1e-300}',
    "not a number": '{"type": "number", "minimum": NaN}',
    "a pattern of groups": json.dumps({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}),
    "a pattern of stars": json.dumps({"type": "string", "pattern": "^(((a+)+)+)+$"}),
    "a pattern of repeats": json.dumps({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}),
    "a pattern of large repeats": json.dumps({"type": "string", "pattern": "^(((a{9999}){9999}){9999}){9999}$"}),
    "a pattern that is too long": json.dumps({"type": "string", "pattern": "a|" * 100_000}),
    "a pattern of classes": json.dumps({"type": "string", "pattern": "[^x]" * 2000}),
    "an open pattern": json.dumps({"type": "string", "pattern": "[" * 100}),
    "a pattern of operators": json.dumps({"type": "string", "pattern": "a" + "*" * 1000}),
    "NUL": json.dumps({"const": "\0" * 100}),
    "NUL in a pattern": json.dumps({"type": "string", "pattern": "^\0$"}),
    "NUL behind": '{"type": "integer"}\0',
    "a lone surrogate": '{"const": "\\udfff"}',
    "a surrogate as a key": '{"properties": {"\\ud83d": {}}}',
    "control words": json.dumps({"const": "<|im_end|><|endoftext|></s>"}),
    "a reference far away": '{"$ref": "#/' + "a/" * 100_000 + '"}',
    "a reference by a large number": '{"$ref": "#/anyOf/99999999999999999999", "anyOf": [{}]}',
    "percent signs": '{"$ref": "#/%%%zz~~~0"}',
    "a type of types": '{"type": [' + '"null",' * 100_000 + '"null"]}',
    "a required list": json.dumps({"required": [f"r{i}" for i in range(5000)]}),
    "prefixItems": json.dumps({"prefixItems": [{"type": "null"}] * 3000}),
    "not an object": "[1, 2, 3]",
    "a text": '"string"',
    "a key that is a number's": '{"minimum": "5"}',
    **{name: json.dumps({"enum": [c, c * 1000], "description": c}) for name, c in PLANES.items()},
}

GRAMMARS = {
    "a rule that begins with |": 'root ::= | "a"',
    "nothing but |": "root ::= " + "|" * 100_000,
    "a large repeat": "root ::= [a-z]{5000}",
    "repeats of repeats": 'root ::= ((("a"{1000}){1000}){1000}){1000}',
    "ambiguous repeats": 'root ::= ((("a"{0,99}){0,99}){0,99}){0,99}',
    "a repeat beyond all": 'root ::= "a"{99999999999999999999}',
    "repeats of nothing": 'root ::= (""{1000000}){1000000}',
    "stars of stars": 'root ::= "a"' + "*" * 50,
    "too many stars": 'root ::= "a"' + "*+?" * 100_000,
    "parentheses 60": "root ::= " + "(" * 60 + '"a"' + ")" * 60,
    "parentheses": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "open parentheses": "root ::= " + "(" * 100_000,
    "left recursion": 'root ::= root "a" | "a"',
    "left recursion in a circle": 'root ::= a\na ::= b "x"\nb ::= c "y"\nc ::= a "z" | "c"',
    "hidden left recursion": 'root ::= e root "a" | "a"\ne ::= "x"?',
    "only itself": "root ::= root",
    "rules in a circle": "root ::= a\na ::= b\nb ::= root",
    "no end": 'root ::= "a" root',
    "a long chain": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"',
    "a long chain that goes on": "root ::= r0\n"
    + "".join(f'r{i} ::= r{i + 1} "x"\n' for i in range(5000))
    + 'r5000 ::= "a"',
    "doubling": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"',
    "doubling of nothing": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= ""',
    "doubling of alternatives": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(60))
    + 'r60 ::= "a"',
    "every way to cut": 'root ::= x*\nx ::= "a" | "aa" | "aaa" | x2\nx2 ::= "a" x',
    "palindromes": 'root ::= "a" root "a" | "b" root "b" | ""',
    "brackets": 'root ::= ("(" root ")")*',
    "many rules": "root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(20_000)),
    "many alternatives": "root ::= " + " | ".join(f'"word {i}"' for i in range(20_000)),
    "many alternatives of rules": "root ::= "
    + " | ".join(f"r{i % 3000}" for i in range(20_000))
    + "\n"
    + "".join(f'r{i} ::= [a-z] "{i}"\n' for i in range(3000)),
    "a long literal": 'root ::= "' + "a" * 300_000 + '"',
    "a literal that is too long": 'root ::= "' + "a" * 900_000 + '"',
    "a grammar that is too long": 'root ::= "a" #' + "x" * 2_000_000,
    "a long class": "root ::= [" + "".join(map(chr, range(0x4E00, 0x9FA5, 2))) + "]",
    "many classes": "root ::= " + '[^"]' * 5000,
    "too many classes": "root ::= " + "[^\\u1234]" * 50_000,
    "a long name": "root ::= " + "x" * 500_000,
    "many comments": "#\n" * 400_000 + 'root ::= "a"',
    "many blanks": "root ::= " + " \t" * 400_000 + '"a"',
    "many lines": "\n" * 900_000 + 'root ::= "a"',
    "NUL": "\0",
    "NUL in a literal": 'root ::= "\0"',
    "NUL in a class": "root ::= [\\x00-\\x01]",
    "a surrogate": 'root ::= "\ud800"',
    "a surrogate by its number": 'root ::= "\\uD800"',
    "a range over the surrogates": "root ::= [\\uD7FF-\\uE000]",
    "beyond Unicode": 'root ::= "\\U00110000"',
    "backslashes": 'root ::= "' + "\\" * 99_999,
    "braces": "root ::= " + "{" * 100_000,
    "quotes": "root ::= " + '"' * 99_999,
    "tokens": "root ::= <[1]> !<x>",
    "control words": 'root ::= "<|im_end|>" "</s>"',
    "carriage returns": 'root ::= "a"\r\nx ::= "b"\r\n',
    "a mark of byte order": '\ufeffroot ::= "a"',
    "nothing": "",
    **{f"{name} in a literal": f'root ::= "{c}"{{2}} [{c}-{c}]' for name, c in PLANES.items()},
}
CASES = [(parse_schema, name, text) for name, text in SCHEMAS.items()]
CASES += [(parse_gbnf, name, text) for name, text in GRAMMARS.items()]


def test_there_are_enough():
    assert len(CASES) >= 120


@pytest.mark.parametrize(
    ("parse", "text"), [(p, t) for p, _, t in CASES], ids=[f"{p.__name__} {n}" for p, n, _ in CASES]
)
def test_it_is_refused_or_works(parse, text):
    started_s, error = time.process_time(), None
    try:
        constraint = TokenGrammar(parse(text), LEXICON).constraint()
        for _ in range(60):
            if constraint.is_complete:
                break
            tokens = np.flatnonzero(constraint.allowed())
            assert len(tokens)
            if tokens[-1] > 255 and len(tokens) < 3:
                break
            token = int(tokens[len(tokens) // 2 if tokens[len(tokens) // 2] < 256 else 0])
            assert constraint.allows(token)
            constraint.accept(token)
    except UnusableInputError as refused:
        error = refused
    assert error is None or (error.exit_code == 4 and len(error.message) < 400 and error.hint)
    assert time.process_time() - started_s < MAX_S
