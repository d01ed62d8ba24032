"""`edgeinfer.tokenize`, and which vocabulary a GGUF file's text goes through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.model import NativeVocabularyFile
from edgeinfer.runtime.vocabulary import METADATA_KEY, OriginalVocabulary
from edgeinfer.types import Vocabulary


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text, and the bytes that it stands for."""

    id: int
    piece: bytes


def vocabulary_of(header: Header, native: Vocabulary) -> Vocabulary:
    """The vocabulary of a file: the C library's, or with the original tokenizer that the file carries."""
    if METADATA_KEY not in header.metadata:
        return native
    return OriginalVocabulary(native, lambda: header.metadata.text(METADATA_KEY), str(header.path))


@contextmanager
def open_vocabulary(path: Path) -> Iterator[Vocabulary]:
    """The vocabulary of a GGUF file without its weights. Raises NotFoundError and UnusableInputError."""
    header = checked_header(path)
    with NativeVocabularyFile(path) as native:
        yield vocabulary_of(header, native.vocabulary)


def tokenize(model: str | Path, text: str, *, add_special: bool = True) -> list[Token]:
    """The tokens that a GGUF model's vocabulary splits `text` into; spelled-out control tokens count as those.

    `add_special` puts the tokens around it that the model wants around every text. Reads no weights. Raises
    NotFoundError, UnusableInputError.
    """
    with open_vocabulary(resolve(model)) as vocabulary:
        ids = vocabulary.tokenize(text, add_special=add_special, parse_special=True).tolist()
        return [Token(token, vocabulary.piece(token, special=True)) for token in ids]
