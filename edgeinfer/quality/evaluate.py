"""`edgeinfer.evaluate`: how well a model predicts a text, and how far it is from a reference.

Model and reference run the same passages side by side, so that no logits need to be stored.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.api.files import read_text
from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime import passages, scores
from edgeinfer.types import Tokens

DEFAULT_CTX_SIZE = 512
_DEFAULTS = RuntimeOptions()


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model is from its reference; nats, and probabilities from 0 to 1. `*_error` is a standard error."""

    reference: str
    reference_perplexity: float
    reference_perplexity_error: float
    log_perplexity_ratio: float
    log_perplexity_ratio_error: float
    kld_mean: float
    kld_mean_error: float
    kld_median: float
    kld_p90: float
    kld_p99: float
    kld_max: float
    same_top: float
    """The share of tokens where both think the same one likeliest."""
    same_top_error: float
    delta_p_mean: float
    """Of the probability of the text's tokens, the model's less the reference's."""
    delta_p_mean_error: float
    delta_p_rms: float
    delta_p_rms_error: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `eval --json` prints."""

    model: str
    kernels: str
    """The library that ran it."""
    ctx_size: int
    chunks: int
    tokens: int
    """How many were scored: the second half of each chunk."""
    perplexity: float
    perplexity_error: float
    divergence: Divergence | None
    seconds: float


def evaluate(
    model: str | Path,
    text: str | Path,
    *,
    reference: str | Path | None = None,
    ctx_size: int = DEFAULT_CTX_SIZE,
    chunks: int | None = None,
    options: RuntimeOptions = _DEFAULTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score a GGUF model on the file `text`, in passages of `ctx_size` tokens whose second halves count.

    With a `reference` (the unquantized model, as a rule) also the divergence from it; adapters and kernels are the
    model's alone. `chunks` limits the work to that many passages; `progress` is told those done and their total. Raises
    NotFoundError, UnusableInputError (a text too short, models of different vocabularies, logits that are not finite),
    UsageError, ResourceError.
    """
    started_s = time.perf_counter()
    content = read_text(Path(text))
    options = replace(options, ctx_size=ctx_size, batch_size=passages.MAX_PASS_TOKENS, prefix_cache=False)
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(load(model, options))]
        if reference is not None:
            # By llama.cpp whatever runs the model, so that it is the same one for both of its libraries.
            same = replace(options, lora=(), kernels="llama.cpp")
            models.append(stack.enter_context(load(reference, same)))
        if len(models) > 1:
            _check_vocabularies(*models)
        pieces = passages.cut(models[0].vocabulary, content, ctx_size, chunks)
        found: list[scores.Comparison] = []
        losses: list[scores.Values] = []
        for number, piece in enumerate(pieces, 1):
            if len(models) > 1:
                found += _compared(models[0], models[1], piece)
            else:
                losses += _scored(models[0], piece)
            progress(number, len(pieces))
    whole = scores.join(found) if found else None
    all_losses = whole.losses if whole else np.concatenate(losses)
    perplexity = scores.perplexity(all_losses)
    if not math.isfinite(perplexity.value) or (whole and not np.isfinite(whole.divergences).all()):
        raise UnusableInputError(f"{model}: gives logits that are not finite", "is the file broken? convert it again")
    return Evaluation(
        model=str(model),
        kernels=models[0].kernels,
        ctx_size=ctx_size,
        chunks=len(pieces),
        tokens=len(all_losses),
        perplexity=perplexity.value,
        perplexity_error=perplexity.error,
        divergence=_summary(str(reference), whole) if whole else None,
        seconds=round(time.perf_counter() - started_s, 3),
    )


def _scored(model: Model, piece: Tokens) -> Iterator[scores.Values]:
    for position, logits in passages.run(model.backend, piece, len(piece) // 2):
        following = piece[position + 1 :][: len(logits)]
        if len(following):
            yield scores.losses(logits, following)


def _compared(model: Model, reference: Model, piece: Tokens) -> Iterator[scores.Comparison]:
    first = len(piece) // 2
    both = zip(passages.run(model.backend, piece, first), passages.run(reference.backend, piece, first), strict=True)
    for (position, logits), (_, reference_logits) in both:
        following = piece[position + 1 :][: len(logits)]
        if len(following):
            yield scores.compare(logits, reference_logits, following)


def _check_vocabularies(model: Model, reference: Model) -> None:
    ours, theirs = (
        (m.vocabulary.n_tokens, m.vocabulary.adds_bos, m.vocabulary.bos, m.header.metadata.get("tokenizer.ggml.tokens"))
        for m in (model, reference)
    )
    if ours != theirs:
        raise UnusableInputError(
            f"{model.header.path} and {reference.header.path} have different vocabularies "
            f"({ours[0]} and {theirs[0]} tokens)",
            "compare with a file that was made from the same checkpoint",
        )


def _summary(reference: str, whole: scores.Comparison) -> Divergence:
    perplexity, ratio = scores.perplexity(whole.reference_losses), whole.log_ratio
    divergence, change = scores.mean(whole.divergences), scores.mean(whole.probability_changes)
    median, p90, p99, largest = (float(v) for v in np.percentile(whole.divergences, [50, 90, 99, 100]))
    return Divergence(
        reference=reference,
        reference_perplexity=perplexity.value,
        reference_perplexity_error=perplexity.error,
        log_perplexity_ratio=ratio.value,
        log_perplexity_ratio_error=ratio.error,
        kld_mean=divergence.value,
        kld_mean_error=divergence.error,
        kld_median=median,
        kld_p90=p90,
        kld_p99=p99,
        kld_max=largest,
        same_top=whole.agreement.value,
        same_top_error=whole.agreement.error,
        delta_p_mean=change.value,
        delta_p_mean_error=change.error,
        delta_p_rms=whole.rms_change.value,
        delta_p_rms_error=whole.rms_change.error,
    )
