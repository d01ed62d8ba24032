"""A sampler that looks at the likeliest tokens only chooses as it would behind the mask of all tokens."""

import numpy as np
import pytest
from grammar_parts import Among, of_schema, schemas
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime import constrained
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.constrained import ConstrainedSampler
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeVocabulary
from edgeinfer.runtime.prompt import raw_tokens

N_VOCAB = 2000


class Truncating:
    """Draws from the likeliest tokens; of equal ones those with the lower ids are the likelier."""

    def __init__(self, reach, seed=0):
        self.reach, self.seed = reach, seed
        self._random = np.random.default_rng(seed)

    def sample(self, logits):
        kept = np.argsort(-logits, kind="stable")[: self.reach]
        weights = np.exp(logits[kept] - logits[kept[0]], dtype=np.float64)
        return int(self._random.choice(kept, p=weights / weights.sum()))

    def accept(self, token):
        pass


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0, 0.01, 0.3, 0.9]), st.booleans())
def test_the_choice_is_the_one_behind_the_mask(seed, reach, density, has_equals):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (8, N_VOCAB)).astype(np.float32)
    if has_equals:
        rows = np.round(rows)
    allowed = rng.random(N_VOCAB) < density
    allowed[7] = True
    sides = [ConstrainedSampler(Truncating(reach, seed), Among(allowed, n_choices)) for n_choices in (256, 1)]
    chosen = [[side.sample(row) for row in rows] for side in sides]
    assert chosen[0] == chosen[1]
    assert allowed[chosen[0]].all()


def test_where_much_is_allowed_there_is_no_mask():
    constraint = Among(np.arange(N_VOCAB) != 3, 256)
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[3, 5]] = 9, 8
    assert ConstrainedSampler(Truncating(1), constraint).sample(logits) == 5
    assert constraint.n_masks == 0
    constraint.n_choices = 1
    assert ConstrainedSampler(Truncating(1), constraint).sample(logits) == 5
    assert constraint.n_masks == 1


@pytest.mark.parametrize("reach", [None, N_VOCAB])
def test_a_sampler_that_looks_at_all_tokens_has_the_mask(reach):
    constraint = Among(np.arange(N_VOCAB) < 2, 256)
    token = ConstrainedSampler(Truncating(reach), constraint).sample(np.arange(N_VOCAB, dtype=np.float32))
    assert token in (0, 1)
    assert constraint.n_masks == 1


def test_what_is_forbidden_and_asked_for_is_an_error():
    class Stubborn(Truncating):
        def sample(self, logits):
            return 3

    with pytest.raises(UsageError, match="forbids all"):
        ConstrainedSampler(Stubborn(1), Among(np.arange(N_VOCAB) != 3, 256)).sample(np.zeros(N_VOCAB, np.float32))


class Hasty(FakeBackend):
    """Likes what ends a text of JSON, so that random answers end."""

    def _logits(self, state):
        logits = super()._logits(state)
        logits[list(b'"]},:0')] += 5
        return logits


@settings(max_examples=30, deadline=None, derandomize=True)
@given(schemas())
def test_answers_are_those_behind_masks(schema):
    try:
        grammar = of_schema(schema)
    except UnusableInputError:
        return
    vocabulary, params = FakeVocabulary(), SamplingParams()

    def answer():
        engine = Engine(Hasty(n_ctx=3000), lambda _: Truncating(6, seed=4))
        prompt = raw_tokens(vocabulary, "hello")
        reply = Reply(engine, vocabulary, prompt, params, max_tokens=120, constraint=grammar.constraint())
        while engine.has_work:
            engine.step()
        return reply.tokens

    found = answer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constrained, "_WIDE_BYTES", 257)
        assert answer() == found
