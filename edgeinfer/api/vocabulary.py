"""`edgeinfer.tokenize`, and which vocabulary a GGUF file's text goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.model import NativeVocabularyFile
from edgeinfer.runtime.vocabulary import METADATA_KEY, OriginalVocabulary, load_original
from edgeinfer.types import Vocabulary


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text, and the bytes that it stands for."""

    id: int
    piece: bytes


Wrap = Callable[[Vocabulary], Vocabulary]


def begin_vocabulary(header: Header) -> Wrap:
    """What makes a file's vocabulary out of the C library's: that one, or with the tokenizer that the file carries.

    A carried one is read from now on in a thread: it takes as long as the C library takes for its own.
    """
    if METADATA_KEY not in header.metadata:
        return lambda native: native
    pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    reading = pool.submit(lambda: load_original(header.metadata.text(METADATA_KEY), str(header.path)))
    pool.shutdown(wait=False)
    return lambda native: OriginalVocabulary(native, reading.result, str(header.path))


@contextmanager
def open_vocabulary(path: Path) -> Iterator[Vocabulary]:
    """The vocabulary of a GGUF file without its weights. Raises NotFoundError and UnusableInputError."""
    vocabulary_over = begin_vocabulary(checked_header(path))
    with NativeVocabularyFile(path) as native:
        yield vocabulary_over(native.vocabulary)


def tokenize(model: str | Path, text: str, *, add_special: bool = True) -> list[Token]:
    """The tokens that a GGUF model's vocabulary splits `text` into; spelled-out control tokens count as those.

    `add_special` puts the tokens around it that the model wants around every text. Reads no weights. Raises
    NotFoundError, UnusableInputError.
    """
    with open_vocabulary(resolve(model)) as vocabulary:
        ids = vocabulary.tokenize(text, add_special=add_special, parse_special=True).tolist()
        return [Token(token, vocabulary.piece(token, special=True)) for token in ids]
