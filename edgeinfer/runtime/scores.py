"""Perplexity and KL divergence from rows of logits, by the definitions of llama.cpp's tools/perplexity.

Everything here takes blocks of rows and keeps a few numbers per row, so memory is a block, whatever the text's length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.types import Logits, Tokens

BLOCK_ROWS = 16
"""Rows of logits that are computed with at once: few enough that the temporaries stay in the caches."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float


def mean(values: Values) -> Mean:
    """Of independent samples; the error is 0 where there are too few to tell."""
    count = len(values)
    variance = float(np.mean(values**2) - np.mean(values) ** 2)
    return Mean(float(np.mean(values)), math.sqrt(variance / (count - 1)) if variance > 0 and count > 10 else 0.0)


def perplexity(losses: Values) -> Mean:
    """The exponential of the mean loss, with the error that the loss's has."""
    loss = mean(losses)
    with np.errstate(over="ignore"):
        value = float(np.exp(loss.value))
    return Mean(value, value * loss.error)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Per token that was scored, in the text's order; float64 arrays of the same length."""

    losses: Values
    """Negative log-likelihoods (in nats) of the model."""
    reference_losses: Values
    divergences: Values
    """KL(reference ‖ model) over the whole vocabulary, in nats."""
    same_top: Values
    """1 where both think the same token likeliest."""

    @property
    def probability_changes(self) -> Values:
        """The model's probability of the text's token, less the reference's."""
        return np.exp(-self.losses) - np.exp(-self.reference_losses)

    @property
    def log_ratio(self) -> Mean:
        """ln(PPL(model) / PPL(reference)); the two are correlated, so its error is less than theirs together."""
        return mean(self.losses - self.reference_losses)

    @property
    def rms_change(self) -> Mean:
        """The root of the mean squared change of probability."""
        squares = mean(self.probability_changes**2)
        root = math.sqrt(squares.value)
        return Mean(root, 0.5 / root * squares.error if root else 0.0)

    @property
    def agreement(self) -> Mean:
        """How often both think the same token likeliest."""
        share, count = float(np.mean(self.same_top)), len(self.same_top)
        return Mean(share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0)


def losses(logits: Logits, tokens: Tokens) -> Values:
    """The negative log-likelihood of `tokens[i]` (one at least) under row `i`."""
    return np.concatenate([_normalizers(block)[0] - block[range(len(t)), t] for block, t in _blocks(logits, tokens)])


def compare(logits: Logits, reference: Logits, tokens: Tokens) -> Comparison:
    """Hold rows of a model against a reference's, where the text goes on with `tokens` (one at least)."""
    found: list[tuple[Values, ...]] = []
    for (ours, t), (theirs, _) in zip(_blocks(logits, tokens), _blocks(reference, tokens), strict=True):
        rows = range(len(t))
        norm, reference_norm, divergence = _divergence(ours, theirs)
        same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        found.append((norm - ours[rows, t], reference_norm - theirs[rows, t], divergence, same.astype(np.float64)))
    return Comparison(*map(np.concatenate, zip(*found, strict=True)))


def divergences(logits: Logits, reference: Logits) -> Values:
    """KL(reference ‖ model) of each row, in nats."""
    starts = range(0, len(logits), BLOCK_ROWS)
    return np.concatenate([_divergence(*(rows[s : s + BLOCK_ROWS] for rows in (logits, reference)))[2] for s in starts])


def _divergence(ours: Logits, theirs: Logits) -> tuple[Values, Values, Values]:
    """Per row the normalizers of a model and of its reference, and the divergence between them."""
    norm, _ = _normalizers(ours)
    reference_norm, probabilities = _normalizers(theirs)
    divergence = np.einsum("ij,ij->i", probabilities, theirs - ours, dtype=np.float64)
    return norm, reference_norm, divergence / probabilities.sum(axis=1, dtype=np.float64) + norm - reference_norm


def join(parts: list[Comparison]) -> Comparison:
    """One after the other."""
    return Comparison(
        np.concatenate([p.losses for p in parts]),
        np.concatenate([p.reference_losses for p in parts]),
        np.concatenate([p.divergences for p in parts]),
        np.concatenate([p.same_top for p in parts]),
    )


def _blocks(logits: Logits, tokens: Tokens) -> list[tuple[Logits, Tokens]]:
    starts = range(0, len(tokens), BLOCK_ROWS)
    return [(logits[: len(tokens)][s : s + BLOCK_ROWS], tokens[s : s + BLOCK_ROWS]) for s in starts]


def _normalizers(block: Logits) -> tuple[Values, NDArray[np.float32]]:
    """Per row the log of the sum of the exponentials, and those exponentials over the largest one."""
    largest = block.max(axis=1, keepdims=True)
    exponentials = np.exp(block - largest)
    sums = exponentials.sum(axis=1, dtype=np.float64)
    return largest[:, 0].astype(np.float64) + np.log(sums), exponentials
