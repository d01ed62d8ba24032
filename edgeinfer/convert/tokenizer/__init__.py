"""From a checkpoint's tokenizer files to GGUF's vocabulary.

`tokenizer.json` is read with the `tokenizers` library itself, never through transformers, whose wrapper changes
what some tokenizers do; a tekken.json or a tokenizer.model that stands alone is retold as one. The file's own rules
decide which of llama.cpp's tokenizers can stand in for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import read_object, read_object_if_there
from edgeinfer.convert.tokenizer import tekken
from edgeinfer.convert.tokenizer.bpe import bpe_vocabulary
from edgeinfer.convert.tokenizer.original import load_original
from edgeinfer.convert.tokenizer.pre_tokenizer import known_by_hash, pre_tokenizer
from edgeinfer.convert.tokenizer.sentencepiece import is_sentencepiece_like, sentencepiece_vocabulary
from edgeinfer.convert.tokenizer.sentencepiece_model import (
    SentencePieceModel,
    read_sentencepiece_model,
    tokenizer_of_model,
)
from edgeinfer.convert.tokenizer.special import begin_token, end_tokens, special_metadata
from edgeinfer.convert.tokenizer.templates import template_metadata
from edgeinfer.convert.tokenizer.unigram import unigram_vocabulary
from edgeinfer.convert.tokenizer.vocabulary import without_unembedded
from edgeinfer.convert.tokenizer.wordpiece import wordpiece_vocabulary
from edgeinfer.errors import UnusableInputError, UsageError

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The `tokenizer.*` keys of the GGUF file, and the original to hold them against."""

    metadata: dict[str, Any]
    original: tokenizers.Tokenizer
    document: dict[str, Any]
    """tokenizer.json, or what stands for it."""
    end_tokens: tuple[int, ...]
    """All tokens that end a generation, as the checkpoint lists them."""
    left_out: tuple[str, ...] = ()
    """Added tokens that the model has no embedding for."""


def load_tokenizer(checkpoint: Checkpoint, pre: str | None = None) -> LoadedTokenizer:
    """Read the tokenizer of a checkpoint, padded to the config's `vocab_size`; `pre` overrides the pre-tokenizer.

    Raises UnusableInputError when there is none, when llama.cpp has no equivalent, or when it has more tokens than
    the embedding; UsageError for a `pre` that has no effect.
    """
    path, whole, settings, model = _read(checkpoint)
    document, left_out = without_unembedded(path, whole, checkpoint.config.vocab_size)
    original = load_original(path, document, as_it_is=document is whole)
    vocabulary = _vocabulary(checkpoint, path, document, settings, model, original, pre)
    special = special_metadata(checkpoint, document, settings, original)
    templates = template_metadata(checkpoint.path, settings)
    metadata = {**vocabulary, **_token_types(checkpoint.config), **special, **templates}
    return LoadedTokenizer(metadata, original, document, tuple(end_tokens(checkpoint)), left_out)


def _token_types(config: Config) -> dict[str, int]:
    """How many kinds of segments ("sentence A", "sentence B") an encoder's embedding tells apart."""
    count = config.get("type_vocab_size")
    return {} if count is None else {"tokenizer.ggml.token_type_count": config.integer("type_vocab_size")}


def _read(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any], dict[str, Any], SentencePieceModel | None]:
    """The file that has the tokenizer, as a tokenizer.json; its settings; the SentencePiece model, if there is one."""
    directory = checkpoint.path
    settings = read_object_if_there(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    if os.path.lexists(path):
        document = read_object(path)
        model_file = directory / "tokenizer.model"
        has_scores = os.path.lexists(model_file) and _kind(document) == "BPE" and is_sentencepiece_like(document)
        return path, document, settings, read_sentencepiece_model(model_file) if has_scores else None
    path = directory / "tekken.json"
    if os.path.lexists(path):
        return path, tekken.tokenizer_of_tekken(path), {**tekken.SETTINGS, **settings}, None
    path = directory / "tokenizer.model"
    if os.path.lexists(path):
        model = read_sentencepiece_model(path)
        return path, tokenizer_of_model(model), settings, model
    raise UnusableInputError(
        f"{directory}: has neither tokenizer.json nor tekken.json nor tokenizer.model",
        "save it with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)",
    )


def _kind(document: dict[str, Any]) -> Any:
    model = document.get("model")
    return model.get("type") if isinstance(model, dict) else None


def _vocabulary(
    checkpoint: Checkpoint,
    path: Path,
    document: dict[str, Any],
    settings: dict[str, Any],
    model: SentencePieceModel | None,
    original: tokenizers.Tokenizer,
    pre: str | None,
) -> dict[str, Any]:
    config, kind = checkpoint.config, _kind(document)
    begin = begin_token(settings, document) if settings.get("add_bos_token") is True else ""
    if kind == "BPE" and not is_sentencepiece_like(document):
        name = pre or pre_tokenizer(path, document, original, begin)
        return bpe_vocabulary(path, document, settings, config.vocab_size, name)
    if pre is not None:
        raise UsageError(f"--pre has no effect: {path} is not a byte-level BPE tokenizer", "drop it")
    if kind == "BPE":
        return sentencepiece_vocabulary(path, document, settings, config.vocab_size, model)
    if kind == "Unigram":
        return unigram_vocabulary(path, document, config.vocab_size)
    if kind == "WordPiece":
        name = known_by_hash(original, begin) or "default"
        return wordpiece_vocabulary(path, document, config.vocab_size, name)
    raise UnusableInputError(
        f"{path}: the tokenizer model {kind!r} is not supported", "supported are BPE, Unigram and WordPiece"
    )
