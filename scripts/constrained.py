"""Measures what it costs to hold an answer to a JSON Schema, at temperature 1, and prints a Markdown table.

Of every pair of answers, one is free and one is held to the schema, in turn and in one process. The grammar begins with
nothing computed for every answer, as in a process of its own. Both end at the same length at the latest, the free one
at nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from fetch_model import fetch
from measuring import Figure
from numpy.typing import NDArray

from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.cli import console
from edgeinfer.grammar.constraint import GrammarConstraint, Lexicon, TokenGrammar
from edgeinfer.grammar.json_schema.compiler import compile_schema
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.types import Constraint

PROMPT = "Describe it as JSON."
_BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "author": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["title", "author", "year"],
}
SCHEMAS = {
    "list of books": {"type": "array", "minItems": 3, "items": _BOOK},
    "person, bounded": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
            "email": {"type": "string", "format": "email"},
        },
        "required": ["name", "age", "tags", "email"],
    },
    "any object": {"type": "object"},
    "twenty numbers": {"type": "array", "items": {"type": "number"}, "minItems": 20, "maxItems": 20},
}
ROW = "| {} | {} | {} | {} | {} |"


class Counted(GrammarConstraint):
    """One that counts the tokens, and those that needed the mask of all tokens."""

    def __init__(self, grammar: TokenGrammar, counts: list[int]) -> None:
        super().__init__(grammar)
        self._counts = counts

    def allowed(self) -> NDArray[np.bool_]:
        """All tokens that may come next."""
        self._counts[1] += 1
        return super().allowed()

    def accept(self, token: int) -> None:
        """The answer goes on."""
        self._counts[0] += 1
        super().accept(token)


def ms_per_token(model: Model, constraint: Constraint | None, seed: int, max_tokens: int) -> float | None:
    """Of decoding, after the first token; None for an answer that is shorter than ten tokens."""
    params = SamplingParams(temperature=1, seed=seed, ignore_eos=constraint is None)
    tokens = model.tokens(PROMPT)
    reply = Reply(model.engine, model.vocabulary, tokens, params, max_tokens=max_tokens, constraint=constraint)
    while reply.finish_reason is None:
        for _ in reply.read():
            pass
        if reply.finish_reason is None:
            model.engine.step()
    generation = reply.generation
    assert generation.finished_s is not None
    assert generation.first_token_s is not None
    if generation.n_answered < 10:
        return None
    return (generation.finished_s - generation.first_token_s) * 1e3 / (generation.n_answered - 1)


def measured(model: Model, name: str, repetitions: int, max_tokens: int) -> str:
    """A row of the table."""
    lexicon = Lexicon(model.vocabulary)
    assert lexicon.tree.n_tokens  # read before anything is timed
    free: list[float] = []
    held: list[float] = []
    ratios: list[float] = []
    counts = [0, 0]
    for seed in range(repetitions):
        constraint = Counted(TokenGrammar(compile_schema(SCHEMAS[name]), lexicon), counts)
        sides: list[tuple[list[float], Constraint | None]] = [(free, None), (held, constraint)]
        times = {id(found): ms_per_token(model, c, seed, max_tokens) for found, c in sides[:: -1 if seed % 2 else 1]}
        free_ms, held_ms = times[id(free)], times[id(held)]
        if free_ms is None or held_ms is None:
            continue
        free.append(free_ms)
        held.append(held_ms)
        ratios.append(free_ms / held_ms)
        console.note(f"  {name}, {seed + 1}/{repetitions}: {free_ms:.2f} ms free, {held_ms:.2f} ms held")
    if not ratios:
        return ROW.format(name, "", "", "", "answers too short")
    figures = [Figure(tuple(values)) for values in (free, held, ratios)]
    share = f"{counts[1]} of {counts[0]} tokens"
    return ROW.format(name, figures[0].text("ms"), figures[1].text("ms"), figures[2].text("×"), share)


def table(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield ROW.format("schema", "free, a token", "held, a token", "speed", "mask needed")
    yield ROW.format(*["---"] * 5)
    options = RuntimeOptions(draft=arguments.draft, prefix_cache=False, threads=arguments.threads)
    with load(arguments.model or fetch("smollm2"), options) as model:
        ms_per_token(model, None, 0, arguments.tokens)  # the prompt is computed, the machine warm
        for name in SCHEMAS:
            yield measured(model, name, arguments.repetitions, arguments.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file (default: SmolLM2-135M)")
    parser.add_argument("-r", "--repetitions", type=int, default=8)
    parser.add_argument("-n", "--tokens", type=int, default=120)
    parser.add_argument("--draft", default="off", help="off shows what the grammar costs, auto what its drafts bring")
    parser.add_argument("--threads", type=int)
    for line in table(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
