"""The scores, held against the definitions written out token by token in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.runtime import scores


def _log_probabilities(row: NDArray[np.float32]) -> list[float]:
    largest = max(map(float, row))
    total = math.log(math.fsum(math.exp(float(x) - largest) for x in row))
    return [float(x) - largest - total for x in row]


def _logits(n_rows: int, n_vocab: int = 50, seed: int = 0, scale: float = 4.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n_rows, n_vocab)).astype(np.float32) * np.float32(scale)


def _tokens(n_rows: int, n_vocab: int = 50) -> NDArray[np.int32]:
    return np.random.default_rng(9).integers(0, n_vocab, n_rows, np.int32)


@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 40])
def test_each_token_is_scored_by_the_row_before_it(n_rows: int) -> None:
    logits, tokens = _logits(n_rows), _tokens(n_rows)
    expected = [-_log_probabilities(row)[token] for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(scores.losses(logits, tokens), expected, rtol=1e-6)
    found = scores.compare(logits, logits, tokens)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-6)
    np.testing.assert_allclose(found.reference_losses, expected, rtol=1e-6)


@pytest.mark.parametrize("n_rows", [1, 16, 33])
def test_the_divergence_is_the_references_from_the_model(n_rows: int) -> None:
    logits, reference, tokens = _logits(n_rows, seed=1), _logits(n_rows, seed=2), _tokens(n_rows)
    found = scores.compare(logits, reference, tokens)
    for i in range(n_rows):
        ours, theirs = _log_probabilities(logits[i]), _log_probabilities(reference[i])
        expected = math.fsum(math.exp(q) * (q - p) for p, q in zip(ours, theirs, strict=True))
        assert found.divergences[i] == pytest.approx(expected, rel=1e-5)
        assert found.same_top[i] == (ours.index(max(ours)) == theirs.index(max(theirs)))
        change = math.exp(ours[tokens[i]]) - math.exp(theirs[tokens[i]])
        assert found.probability_changes[i] == pytest.approx(change, abs=1e-6)


def test_small_divergences_keep_their_digits() -> None:
    """The larger part cancels: with a model near its reference, float32 alone would leave noise."""
    reference, tokens = _logits(20, 5000, scale=3), _tokens(20, 5000)
    logits = reference + _logits(20, 5000, seed=3, scale=1e-3)
    found = scores.compare(logits, reference, tokens)
    for i in range(20):
        ours, theirs = _log_probabilities(logits[i]), _log_probabilities(reference[i])
        expected = math.fsum(math.exp(q) * (q - p) for p, q in zip(ours, theirs, strict=True))
        assert found.divergences[i] == pytest.approx(expected, abs=2e-8)


def test_rows_beyond_the_tokens_are_left_out() -> None:
    logits, tokens = _logits(5), _tokens(4)
    assert len(scores.losses(logits, tokens)) == 4
    assert len(scores.compare(logits, logits, tokens).divergences) == 4


def test_extreme_logits_overflow_nowhere() -> None:
    logits = np.array([[0, 1e30, -1e30], [-300, -200, -100]], np.float32)
    found = scores.losses(logits, np.array([1, 2], np.int32))
    np.testing.assert_allclose(found, [0, 0], atol=1e-6)


def test_means_and_errors_are_those_of_the_sample() -> None:
    values = np.random.default_rng(4).random(100)
    found = scores.mean(values)
    assert found.value == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std(ddof=0) / math.sqrt(99))
    assert scores.mean(values[:10]).error == 0
    perplexity = scores.perplexity(values)
    assert perplexity.value == pytest.approx(math.exp(values.mean()))
    assert perplexity.error == pytest.approx(perplexity.value * found.error)


def test_the_errors_of_a_comparison() -> None:
    logits, reference, tokens = _logits(64, seed=5), _logits(64, seed=6), _tokens(64)
    found = scores.join([scores.compare(logits[:30], reference[:30], tokens[:30])] * 2)
    assert len(found.losses) == len(found.reference_losses) == len(found.divergences) == len(found.same_top) == 60
    p, n = found.agreement.value, 60
    assert found.agreement.error == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    squares = found.probability_changes**2
    root = math.sqrt(squares.mean())
    assert found.rms_change.value == pytest.approx(root)
    assert found.rms_change.error == pytest.approx(0.5 / root * squares.std() / math.sqrt(n - 1))
    # As tools/perplexity has it: both variances less twice the covariance.
    a, b = found.losses, found.reference_losses
    covariance = ((a * b).mean() - a.mean() * b.mean()) / (n - 1)
    variance = scores.mean(a).error ** 2 + scores.mean(b).error ** 2 - 2 * covariance
    assert found.log_ratio.value == pytest.approx(a.mean() - b.mean())
    assert found.log_ratio.error == pytest.approx(math.sqrt(variance))
