"""A batch with everything in it at once: every row comes out as it does alone, in its place, or with its own error."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from cache_parts import open_cache
from grammar_parts import of_gbnf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from edgeinfer.errors import UnusableInputError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.batch import Batch, ReadAhead
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeSampler, FakeVocabulary
from edgeinfer.scheduling.policy import Limits
from edgeinfer.speculation.draft import Proposal
from edgeinfer.speculation.lookup import Lookup

VOCABULARY = FakeVocabulary()
BEGINNINGS = ["", "a beginning that rows share ", "a beginning that rows share, " + "and it is a long one " * 8]
GRAMMARS = ['root ::= "yes" | "no"', "root ::= [0-9]+", 'root ::= "a" [a-z]{2,9} "!"']
FAILING_SEED = 666
MEMORIES = [{}, {}, {"can_save": False}, {"can_trim": False}, {"window": 25}]


@dataclass(frozen=True)
class Row:
    prompt: str
    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    grammar: str | None
    priority: int
    deadline_ms: float | None


class MixedSampler(FakeSampler):
    """Of one seed it finds no token after a while."""

    def sample(self, logits):
        if self.seed == FAILING_SEED and len(self._history) % 7 == 3:
            raise UnusableInputError("no token can be chosen")
        return super().sample(logits)


class Guesses:
    """A source of drafts that likes letters, and is right by chance."""

    name, is_free = "guesses", False

    def expected(self, grade):
        return 0.9

    def open(self, request):
        return self

    def observe(self, tokens):
        pass

    def propose(self, max_tokens):
        return Proposal(self.name, tuple(b"yes12a")[:max_tokens], (0,) * min(6, max_tokens))

    def close(self):
        pass


def rows():
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        seed=st.sampled_from([0, 1, 2, FAILING_SEED]),
        repeat_penalty=st.sampled_from([1.0, 1.5]),
        ignore_eos=st.booleans(),
    )
    prompts = st.tuples(st.sampled_from(BEGINNINGS), st.text("ab<", max_size=6)).map("".join)
    return st.builds(
        Row,
        prompt=prompts,
        params=params,
        max_tokens=st.sampled_from([None, -1, 0, 1, 5, 30]),
        stop=st.sampled_from([(), (), ("e",), ("<", "a", "zz")]),
        grammar=st.sampled_from([None, None, None, *GRAMMARS]),
        priority=st.sampled_from([0, 0, 1, -(2**53) + 1, 2**53 - 1]),
        deadline_ms=st.sampled_from([None, 0.0, -1e15, 1e-9, 9e15]),
    )


CLOCKS = {
    "still": lambda: itertools.repeat(5.0),
    "even": lambda: itertools.count(0, 0.01),
    "hasty": lambda: itertools.count(0, 20.0),
    "backwards": lambda: itertools.count(0, -0.5),
    "jumping": lambda: itertools.cycle([0.0, 1e9, 3.0, -1e9]),
}


@dataclass(frozen=True)
class Machine:
    """What a batch runs on."""

    n_ctx: int
    width: int
    kept: int
    batch: int
    target_ms: float | None
    memory: dict
    clock: str
    drafts: bool
    cache_nbytes: int | None


def machines():
    return st.builds(
        Machine,
        n_ctx=st.sampled_from([8, 40, 100, 250, 600]),
        width=st.integers(1, 6),
        kept=st.integers(0, 6),
        batch=st.sampled_from([1, 3, 16, 64]),
        target_ms=st.sampled_from([None, 1.0, float("inf"), float("inf")]),
        memory=st.sampled_from(MEMORIES),
        clock=st.sampled_from(sorted(CLOCKS)),
        drafts=st.booleans(),
        cache_nbytes=st.sampled_from([None, 0, 1, 3000, 1 << 20]),
    )


def start(engine, row):
    tokens = VOCABULARY.tokenize(row.prompt, add_special=False, parse_special=True)
    return Reply(
        engine,
        VOCABULARY,
        tokens,
        row.params,
        max_tokens=row.max_tokens,
        stop=row.stop,
        priority=row.priority,
        deadline_ms=row.deadline_ms,
        constraint=of_gbnf(row.grammar).constraint() if row.grammar else None,
    )


def run(engine, rows):
    """What comes out: text, reason, tokens of prompt and answer; or the error."""
    found = []
    for entry in Batch(engine, ReadAhead(rows, 3), functools.partial(start, engine)):
        assert entry.row is rows[len(found)]
        if entry.error is not None:
            found.append(entry.error.message)
        else:
            found.append((entry.text, entry.finish_reason, entry.usage.prompt_tokens, entry.usage.completion_tokens))
    return found


@functools.cache
def alone(row, n_ctx):
    engine = Engine(
        FakeBackend(n_ctx=2 * n_ctx, max_sequences=1), MixedSampler, limits=Limits(1, max_request_tokens=n_ctx)
    )
    (found,) = run(engine, [row])
    return found


@settings(max_examples=80, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(made=st.lists(rows(), max_size=14), machine=machines(), again=st.booleans())
def test_a_batch_of_everything_is_every_row_alone(made, machine, again, tmp_path_factory):
    backend = FakeBackend(
        n_ctx=machine.n_ctx,
        max_sequences=machine.width + machine.kept,
        max_batch_tokens=machine.batch,
        **machine.memory,
    )
    ticks = CLOCKS[machine.clock]()

    def clock():
        return next(ticks)

    cache = None
    if machine.cache_nbytes is not None:
        cache = open_cache(tmp_path_factory.getbasetemp() / "mixed", budget=machine.cache_nbytes)
    engine = Engine(
        backend,
        MixedSampler,
        cache,
        clock,
        limits=Limits(machine.width, max_request_tokens=machine.n_ctx, latency_target_ms=machine.target_ms),
        remember_shared_only=True,
        drafting=Drafting((Lookup(), Guesses()), backend.n_vocab, clock) if machine.drafts else None,
    )
    for _ in range(1 + again):
        assert run(engine, made) == [alone(row, machine.n_ctx) for row in made]
        assert not engine.has_work
        assert engine._residency._tree.n_referenced == 0
        assert engine._swap._nbytes == 0
    if cache is not None:
        cache.close()
