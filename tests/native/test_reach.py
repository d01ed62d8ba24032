"""The library's chains, held to something: only the likeliest tokens that are allowed can matter to them."""

import numpy as np
import pytest
from grammar_parts import Among

from edgeinfer.native.model import NativeVocabularyFile
from edgeinfer.native.sampler import NativeSamplerFactory
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.constrained import ConstrainedSampler

pytestmark = pytest.mark.model
BIASES = ((5, -2.0), (9, -np.inf))
CHAINS = [
    ({"temperature": 0}, 1),
    ({}, 40),
    ({"temperature": 1.5, "top_k": 7, "typical_p": 0.9, "top_p": 1, "min_p": 0}, 7),
    ({"top_k": 200, "xtc_probability": 0.5, "min_p": 0}, 200),
    ({"logit_bias": BIASES}, 42),
    ({"temperature": 0, "repeat_penalty": 1.3, "repeat_last_n": 20}, 21),
    ({"presence_penalty": 2, "frequency_penalty": 3}, 104),
    ({"dry_multiplier": 4}, 104),
    ({"temperature": 0, "logit_bias": BIASES, "repeat_penalty": 2, "dry_multiplier": 4, "repeat_last_n": 9}, 76),
    ({"top_k": 0}, None),
    ({"logit_bias": ((5, 2.0),)}, None),
    ({"repeat_penalty": 0.9}, None),
    ({"presence_penalty": -1}, None),
    ({"frequency_penalty": -1}, None),
    ({"mirostat": 1}, None),
    ({"mirostat": 2, "top_k": 40}, None),
]


@pytest.fixture(scope="module")
def vocabulary(smollm2_gguf):
    with NativeVocabularyFile(smollm2_gguf) as file:
        yield file.vocabulary


@pytest.mark.parametrize(("options", "reach"), CHAINS)
def test_the_choice_is_the_one_behind_the_mask(vocabulary, options, reach):
    make = NativeSamplerFactory(vocabulary)
    rng = np.random.default_rng(3)
    allowed = rng.random(vocabulary.n_tokens) < 0.5
    constraints = [Among(allowed, n_choices) for n_choices in (256, 1)]
    sides = [ConstrainedSampler(make(SamplingParams(**options, seed=5)), constraint) for constraint in constraints]
    assert [side.reach for side in sides] == [reach, reach]
    likely = rng.choice(vocabulary.n_tokens, 300, replace=False)
    for _ in range(25):
        row = rng.normal(0, 1, vocabulary.n_tokens).astype(np.float32)
        row[likely] += 5  # the penalties meet what is likely
        one, other = (side.sample(row) for side in sides)
        assert one == other
        assert allowed[one]
        for side in sides:
            side.accept(one)
    assert constraints[1].n_masks > 2
    assert constraints[0].n_masks == (constraints[1].n_masks if reach is None else 0)


def test_ignored_end_tokens_are_counted(vocabulary):
    n_ends = len(vocabulary.end_tokens)
    assert n_ends
    assert NativeSamplerFactory(vocabulary)(SamplingParams(ignore_eos=True)).reach == 40 + n_ends
