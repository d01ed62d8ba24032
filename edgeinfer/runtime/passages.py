"""A long text cut into contexts and run one by one, as llama.cpp's tools perplexity and imatrix do it."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.errors import EdgeinferError, UnusableInputError, UsageError
from edgeinfer.types import Backend, KVOp, Logits, Refusal, Row, Tokens, Vocabulary

MAX_PASS_TOKENS = 512
"""Of one pass: llama.cpp's micro-batch, which is computed at once anyway; more only takes memory for the logits."""


def cut(vocabulary: Vocabulary, text: str, ctx_size: int, limit: int | None = None) -> list[Tokens]:
    """The first `limit` passages of `ctx_size` tokens; an incomplete last one is left out.

    Where the model wants a begin-of-sequence token, every passage's first token is replaced by it. Raises UsageError
    for sizes that cannot be, UnusableInputError for a text of less than two passages.
    """
    if ctx_size < 8:
        raise UsageError(f"passages of {ctx_size} tokens", "give at least 8")
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} passages", "give at least 1")
    # Like every prompt that llama.cpp's tools read from a file, without the last line's end.
    tokens = vocabulary.tokenize(text.removesuffix("\n"), add_special=True, parse_special=False)
    if len(tokens) < 2 * ctx_size:
        raise UnusableInputError(
            f"the text has {len(tokens)} tokens, {2 * ctx_size} are needed at least",
            f"give a longer text, or contexts of fewer tokens than {ctx_size}",
        )
    passages = [tokens[start : start + ctx_size] for start in range(0, len(tokens) - ctx_size + 1, ctx_size)]
    if vocabulary.adds_bos and vocabulary.bos is not None:
        for passage in passages:
            passage[0] = vocabulary.bos
    return passages[:limit]


def run(backend: Backend, passage: Tokens, first: int) -> Iterator[tuple[int, Logits]]:
    """Run a passage from an empty cache; give the logits for its positions from `first` on.

    Each item is a position and the rows from there on, valid until the next step.
    """
    backend.apply(KVOp("remove", 0, 0, 0, -1))
    step = min(MAX_PASS_TOKENS, backend.max_batch_tokens)
    for start in range(0, len(passage), step):
        piece = passage[start : start + step]
        from_ = min(max(first - start, 0), len(piece))
        logits = backend.forward([Row(0, piece, start, from_)])
        if isinstance(logits, Refusal):
            raise EdgeinferError(f"the model could not run: {logits.value}")
        if len(logits):
            yield start + from_, logits
