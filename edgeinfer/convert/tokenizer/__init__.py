"""From a checkpoint's tokenizer files to GGUF's vocabulary.

`tokenizer.json` is read with the `tokenizers` library itself, never through transformers, whose wrapper changes
what some tokenizers do; the file's own rules decide which of llama.cpp's tokenizers can stand in for it.
"""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.json_file import MAX_JSON_NBYTES, parse_object, read_file, read_object_if_there
from edgeinfer.convert.tokenizer.bpe import bpe_vocabulary
from edgeinfer.convert.tokenizer.sentencepiece import is_sentencepiece_like, sentencepiece_vocabulary
from edgeinfer.convert.tokenizer.special import special_metadata
from edgeinfer.errors import UnusableInputError

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The `tokenizer.*` keys of the GGUF file, and the original to hold them against."""

    metadata: dict[str, Any]
    original: tokenizers.Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> LoadedTokenizer:
    """Read the tokenizer of a checkpoint, padded to the config's `vocab_size`.

    Raises UnusableInputError when there is none, when llama.cpp has no equivalent, or when it has more tokens than
    the embedding.
    """
    path = checkpoint.path / "tokenizer.json"
    if not os.path.lexists(path):
        raise UnusableInputError(
            f"{checkpoint.path}: has no tokenizer.json",
            "save it with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )
    data = read_file(path, MAX_JSON_NBYTES)
    parsed = parse_object(data, str(path))
    original = _load_original(path, data)
    settings = read_object_if_there(checkpoint.path / "tokenizer_config.json")
    model = parsed.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise UnusableInputError(f"{path}: the tokenizer model {kind!r} is not supported", "supported is BPE")
    check_normalizer(path, parsed.get("normalizer"))
    build = sentencepiece_vocabulary if is_sentencepiece_like(parsed) else bpe_vocabulary
    vocabulary = build(path, parsed, settings, checkpoint.config.vocab_size)
    special = special_metadata(checkpoint, parsed, settings)
    return LoadedTokenizer({**vocabulary, **special}, original)


def _load_original(path: Path, data: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        original = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception for anything it dislikes in a file
        raise UnusableInputError(f"{path}: not a usable tokenizer ({error})", "download the file again") from None
    # Settings of some training run, of no meaning here; absurd ones make the library panic.
    original.no_truncation()
    original.no_padding()
    return original


def check_normalizer(path: Path, section: Any) -> None:
    """Raise UnusableInputError for a change of the text that llama.cpp would not make.

    NFC it does not make either, but text is nearly always in that form already.
    """
    match section:
        case None | {"type": "NFC"} | {"type": "Prepend", "prepend": "▁"}:
            return
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return
        case {"type": "Sequence", "normalizers": [*steps]}:
            for step in steps:
                check_normalizer(path, step)
            return
    raise UnusableInputError(
        f"{path}: unknown normalizer {reprlib.repr(section)}", "known are NFC and SentencePiece's marks for spaces"
    )
