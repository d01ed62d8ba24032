"""A vocabulary that splits text as the checkpoint's own tokenizer does, where the C library's cannot.

Only `tokenize` differs: pieces, end tokens and everything else are those of the vocabulary in the file, so the bytes
that an answer is put together from are the same either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.tokenizer_json import (
    encode_all,
    encode_as_text,
    load_tokenizer_json,
    normalized_chars,
    special_tokens,
)
from edgeinfer.types import Tokens, Vocabulary

if TYPE_CHECKING:
    import tokenizers

METADATA_KEY = "tokenizer.huggingface.json"
"""GGUF's key for the original tokenizer.json."""
_REMEDY = "convert the model again"
MAX_CHARS = 1 << 22
"""Of a text. The library takes 300 to 900 bytes of memory for a character of a text without words."""


def load_original(document: str, subject: str) -> tokenizers.Tokenizer:
    """The tokenizer that the file `subject` carries. Raises UnusableInputError when it is none."""
    return load_tokenizer_json(document, f"{subject}: {METADATA_KEY}", _REMEDY)


class OriginalVocabulary:
    """`types.Vocabulary` over another one and a tokenizer, which is asked for when first needed.

    `tokenize` raises what asking for it raises, and UnusableInputError when it is one of another model.
    """

    def __init__(self, base: Vocabulary, get_original: Callable[[], tokenizers.Tokenizer], subject: str) -> None:
        self._base = base
        self._get_original = get_original
        self._subject = subject
        self._lock = threading.Lock()
        self._special: dict[int, str] | None = None

    @property
    def n_tokens(self) -> int:
        """How many tokens there are."""
        return self._base.n_tokens

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts the begin-of-sequence token in front."""
        return self._base.adds_bos

    def pieces(self) -> list[bytes]:
        """The bytes of every token, in the order of the tokens."""
        return self._base.pieces()

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end a generation."""
        return self._base.end_tokens

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token."""
        return self._base.bos

    @property
    def eos(self) -> int | None:
        """The end-of-sequence token."""
        return self._base.eos

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens give nothing unless `special`."""
        return self._base.piece(token, special=special)

    def text(self, token: int) -> str:
        """How the vocabulary spells a token."""
        return self._base.text(token)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Token ids of `text`, between the tokens that the file says belong around a text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("the text is not valid Unicode", "give UTF-8 text") from None
        if len(text) > MAX_CHARS:
            raise UsageError(
                f"the text has {len(text)} characters, this model's tokenizer takes {MAX_CHARS} at once",
                "give a part of it",
            )
        original = self._get_original()
        with self._lock:
            if normalized_chars(original, text, MAX_CHARS) > MAX_CHARS:
                raise UsageError(
                    f"the text becomes longer than the {MAX_CHARS} characters that this model's tokenizer takes",
                    "give a part of it",
                )
            tokens = np.array(self._encoded(original, text, parse_special), np.int64)
        if len(tokens) and int(tokens.max()) >= self.n_tokens:
            raise UnusableInputError(
                f"{self._subject}: {METADATA_KEY} gives token {int(tokens.max())}, the vocabulary has {self.n_tokens}",
                _REMEDY,
            )
        if not add_special:
            return tokens.astype(np.int32)
        frame = self._base.tokenize("", add_special=True, parse_special=False)
        n_before = int(self.adds_bos)
        return np.concatenate([frame[:n_before], tokens.astype(np.int32), frame[n_before:]])

    def _encoded(self, original: tokenizers.Tokenizer, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            original.encode_special_tokens = False
            return encode_all(original, [text])[0]
        if self._special is None:
            self._special = special_tokens(original)
        return encode_as_text(original, text, self._special)
