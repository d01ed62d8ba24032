"""From a checkpoint's tokenizer files to GGUF's vocabulary.

`tokenizer.json` is read with the `tokenizers` library itself, never through transformers, whose wrapper changes
what some tokenizers do; a tekken.json, tiktoken.model or tokenizer.model that stands alone is retold as one. The file's
own rules decide which of llama.cpp's tokenizers can stand in for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import MAX_JSON_NBYTES, read_file, read_object, read_object_if_there
from edgeinfer.convert.tokenizer import tekken
from edgeinfer.convert.tokenizer.added import with_added_tokens
from edgeinfer.convert.tokenizer.bpe import bpe_vocabulary
from edgeinfer.convert.tokenizer.pre_tokenizer import known_by_hash, name_pre_tokenizer, names_by_rules
from edgeinfer.convert.tokenizer.rwkv_world import FILE_NAME as WORLD_FILE
from edgeinfer.convert.tokenizer.rwkv_world import tokenizer_of_world, world_vocabulary
from edgeinfer.convert.tokenizer.sentencepiece import (
    gemma4_vocabulary,
    is_sentencepiece_like,
    sentencepiece_vocabulary,
)
from edgeinfer.convert.tokenizer.sentencepiece_model import (
    SentencePieceModel,
    read_sentencepiece_model,
    tokenizer_of_model,
)
from edgeinfer.convert.tokenizer.special import begin_token, end_tokens, lost_ends, special_metadata
from edgeinfer.convert.tokenizer.templates import template_metadata
from edgeinfer.convert.tokenizer.tiktoken import tokenizer_of_tiktoken
from edgeinfer.convert.tokenizer.unigram import unigram_vocabulary
from edgeinfer.convert.tokenizer.vocabulary import without_unembedded
from edgeinfer.convert.tokenizer.wordpiece import wordpiece_vocabulary
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.tokenizer_json import load_tokenizer_json

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The `tokenizer.*` keys of the GGUF file, and the original to hold them against."""

    metadata: dict[str, Any]
    original: tokenizers.Tokenizer
    document: dict[str, Any]
    """tokenizer.json, or what stands for it."""
    end_tokens: tuple[int, ...] = ()
    """The tokens that end a generation, as the checkpoint lists them, but for the lost ones."""
    lost_ends: tuple[int, ...] = ()
    """Those that the file format has no place for."""
    left_out: tuple[str, ...] = ()
    """Added tokens that the model has no embedding for."""
    is_assumed: bool = False
    """Whether the pre-tokenizer is one that the user named and the file's rules don't confirm."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What a checkpoint says about its tokenizer."""

    path: Path
    document: dict[str, Any]
    """tokenizer.json, or what stands for it."""
    settings: dict[str, Any]
    """tokenizer_config.json."""
    model: SentencePieceModel | None = None

    @property
    def is_world(self) -> bool:
        """Whether it is RWKV's, which has no special tokens but the one that its vocabulary begins with."""
        return self.path.name == WORLD_FILE

    @property
    def kind(self) -> str:
        """The type of the tokenizer's model."""
        match self.document.get("model"):
            case {"type": str(kind)}:
                return kind
        return "unknown"


def load_tokenizer(checkpoint: Checkpoint, pre: str | None = None) -> LoadedTokenizer:
    """Read the tokenizer of a checkpoint, padded to the config's `vocab_size`; `pre` overrides the pre-tokenizer.

    Raises UnusableInputError when there is none, when llama.cpp has no equivalent, or when it has more tokens than
    the embedding; UsageError for a `pre` that has no effect.
    """
    files = _read(checkpoint.path)
    document, left_out = without_unembedded(files.document, checkpoint.config.vocab_size)
    original = _original(files, document)
    files = replace(files, document=document)
    metadata = {
        **_vocabulary(checkpoint.config, files, original, pre),
        **_token_types(checkpoint.config),
        **({} if files.is_world else special_metadata(checkpoint, document, files.settings, original)),
        **template_metadata(checkpoint.path, files.settings),
    }
    ends = [] if files.is_world else end_tokens(checkpoint)
    lost = lost_ends(metadata, ends)
    return LoadedTokenizer(
        metadata,
        original,
        document,
        end_tokens=tuple(token for token in ends if token not in lost),
        lost_ends=tuple(lost),
        left_out=left_out,
        is_assumed=pre is not None and pre not in names_by_rules(document),
    )


def _original(files: _Files, document: dict[str, Any]) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer of `document`; the file itself is read where it says the same."""
    as_it_is = document is files.document and files.path.name == "tokenizer.json"
    # Its bytes, not its path: a path may be no text.
    source = read_file(files.path, MAX_JSON_NBYTES) if as_it_is else json.dumps(document)
    return load_tokenizer_json(source, str(files.path), "download the file again")


def _token_types(config: Config) -> dict[str, int]:
    """How many kinds of segments ("sentence A", "sentence B") an encoder's embedding tells apart."""
    count = config.get("type_vocab_size")
    return {} if count is None else {"tokenizer.ggml.token_type_count": config.integer("type_vocab_size")}


def _read(directory: Path) -> _Files:
    settings = read_object_if_there(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    if os.path.lexists(path):
        files = _Files(path, read_object(path), settings)
        has_scores = files.kind == "BPE" and is_sentencepiece_like(files.document)
        model_file = directory / "tokenizer.model"
        if has_scores and os.path.lexists(model_file):
            files = replace(files, model=read_sentencepiece_model(model_file))
        return files
    path = directory / "tekken.json"
    if os.path.lexists(path):
        return _Files(path, tekken.tokenizer_of_tekken(path), {**tekken.SETTINGS, **settings})
    path = directory / WORLD_FILE
    if os.path.lexists(path):
        return _Files(path, tokenizer_of_world(path), settings)
    path = directory / "tiktoken.model"
    if os.path.lexists(path):
        return _Files(path, tokenizer_of_tiktoken(path, settings), settings)
    path = directory / "tokenizer.model"
    if os.path.lexists(path):
        model = read_sentencepiece_model(path)
        return _Files(path, with_added_tokens(directory, tokenizer_of_model(model), settings), settings, model)
    raise UnusableInputError(
        f"{directory}: has neither tokenizer.json nor tekken.json, tiktoken.model, tokenizer.model or {WORLD_FILE}",
        "save it with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)",
    )


def _vocabulary(config: Config, files: _Files, original: tokenizers.Tokenizer, pre: str | None) -> dict[str, Any]:
    path, document, settings = files.path, files.document, files.settings
    begin = begin_token(settings, document) if settings.get("add_bos_token") is True else ""
    if files.kind == "BPE" and not is_sentencepiece_like(document):
        name = pre or name_pre_tokenizer(path, document, original, begin)
        return bpe_vocabulary(path, document, settings, config.vocab_size, name)
    if pre is not None:
        raise UsageError(f"--pre has no effect: {path} is not a byte-level BPE tokenizer", "drop it")
    if files.is_world:
        return world_vocabulary(path, config.vocab_size)
    if files.kind == "BPE" and config.hf_class.startswith("Gemma4"):
        return gemma4_vocabulary(path, document, config.vocab_size)
    if files.kind == "BPE":
        return sentencepiece_vocabulary(path, document, settings, config.vocab_size, files.model)
    if files.kind == "Unigram":
        return unigram_vocabulary(path, document, config.vocab_size)
    if files.kind == "WordPiece":
        name = known_by_hash(original, begin) or "default"
        return wordpiece_vocabulary(path, document, config.vocab_size, name)
    raise UnusableInputError(
        f"{path}: the tokenizer model {files.kind!r} is not supported", "supported are BPE, Unigram and WordPiece"
    )
