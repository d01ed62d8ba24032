"""The `tokenizers` library, whose complaints about a file are errors of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.json_file import MAX_JSON_NBYTES, read_file
from edgeinfer.errors import UnusableInputError

if TYPE_CHECKING:
    import tokenizers


def load_original(path: Path, document: dict[str, Any], *, as_it_is: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, or of the document that stands for it. Raises UnusableInputError.

    `as_it_is`: the document is what stands in `path`, if that is a tokenizer.json.
    """
    import tokenizers

    with _complaints(str(path)):
        if as_it_is and path.name == "tokenizer.json":
            original = tokenizers.Tokenizer.from_buffer(read_file(path, MAX_JSON_NBYTES))  # its name may be no text
        else:
            original = tokenizers.Tokenizer.from_str(json.dumps(document))
    # Settings of some training run, of no meaning here; absurd ones make the library panic.
    original.no_truncation()
    original.no_padding()
    return original


def encode_all(original: tokenizers.Tokenizer, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """The tokens of each text, with those around it if `special`. Raises UnusableInputError when it cannot."""
    with _complaints("the tokenizer"):
        return [encoding.ids for encoding in original.encode_batch(list(texts), add_special_tokens=special)]


@contextmanager
def _complaints(subject: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises plain Exception for anything it dislikes
        raise UnusableInputError(f"{subject}: not a usable tokenizer ({error})", "download the file again") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's own name for a bug of its
            raise
        raise UnusableInputError(f"{subject}: not a usable tokenizer ({error})", "download the file again") from None
