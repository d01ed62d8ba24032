"""The tokens of a step are those that sampling one by one gives, with as many random draws."""

import itertools
from collections import Counter

import numpy as np
import pytest

from edgeinfer.speculation.accept import accepted

TOKENS = range(3)


def probability(context, token):
    """A model of three tokens that looks at the last two."""
    weights = np.random.default_rng([7, *context[-2:]]).dirichlet([1, 1, 1])
    return float(weights[token])


def one_by_one(length):
    """The probability of every text of a length."""
    texts = {}
    for text in itertools.product(TOKENS, repeat=length):
        texts[text] = float(np.prod([probability(text[:i], token) for i, token in enumerate(text)]))
    return texts


def draft_for(context, n):
    """Some deterministic draft: right at times."""
    return [(sum(context) + len(context) + i) % 3 for i in range(n)]


def with_drafts(length, n_draft):
    """The same by enumerating every outcome of every draw of the steps; and that a step draws once per token."""
    texts = Counter()

    def go_on(text, chance):
        if len(text) >= length:
            texts[text[:length]] += chance
            return
        draft = draft_for(text, n_draft)
        for outcomes in itertools.product(TOKENS, repeat=n_draft + 1):
            asked = []

            def choose(row, outcomes=outcomes, asked=asked):
                asked.append(row)
                return outcomes[row]

            new = tuple(accepted(draft, choose))
            assert asked == list(range(len(new)))
            if outcomes[len(new) :] != (0,) * (n_draft + 1 - len(new)):
                continue  # draws that were not made: count this step once
            said = text
            weight = 1.0
            for row, token in enumerate(new):
                weight *= probability((*text, *draft[:row]), token)
                said = (*said, token)
            go_on(said, chance * weight)

    go_on((), 1.0)
    return texts


@pytest.mark.parametrize("n_draft", [0, 1, 2, 3])
def test_the_distribution_of_texts_is_exactly_the_models(n_draft):
    expected = one_by_one(4)
    found = with_drafts(4, n_draft)
    assert sum(found.values()) == pytest.approx(1)
    assert {t: found[t] for t in expected} == pytest.approx(expected)


def test_the_distribution_of_many_draws_is_the_models():
    rng = np.random.default_rng(0)
    found = Counter()
    draws = 100_000
    weights = {
        text: [probability(text, t) for t in TOKENS] for n in range(3) for text in itertools.product(TOKENS, repeat=n)
    }
    cumulated = {text: np.cumsum(w).tolist() for text, w in weights.items()}
    uniform = iter(rng.random(draws * 4).tolist())
    for _ in range(draws):
        text = ()
        while len(text) < 2:
            draft = draft_for(text, 1)

            def choose(row, text=text, draft=draft):
                u = next(uniform)
                first, second, _ = cumulated[(*text, *draft[:row])]
                return 0 if u < first else 1 if u < second else 2

            text = (*text, *accepted(draft, choose))
        found[text[:2]] += 1
    expected = {text: p * draws for text, p in one_by_one(2).items()}
    chi_squared = sum((found[text] - e) ** 2 / e for text, e in expected.items())
    assert chi_squared < 26.1  # 8 degrees of freedom, one in a thousand


@pytest.mark.parametrize(
    ("draft", "chosen", "expected"),
    [([], [5], [5]), ([1, 2], [1, 2, 3], [1, 2, 3]), ([1, 2], [1, 9, 3], [1, 9]), ([1, 2], [9, 2, 3], [9])],
)
def test_it_ends_after_the_first_wrong_token(draft, chosen, expected):
    assert list(accepted(draft, lambda row: chosen[row])) == expected
