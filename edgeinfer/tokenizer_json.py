"""A Hugging Face tokenizer.json, as the `tokenizers` library reads it: loaded, checked, its complaints ours.

Such a file is not trusted, be it a checkpoint's or carried in a GGUF file. A few lines in it can make the library write
more than any memory holds ("replace every e by 2,000 of them", four times), so what it may grow a text by is limited.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from edgeinfer.charsmap import is_sound_charsmap
from edgeinfer.errors import UnusableInputError, last_words

if TYPE_CHECKING:
    import tokenizers

MAX_GROWTH = 1000
"""How many times longer a text may become. XLM-RoBERTa's normalizer could write 33 bytes for a character."""

_STDERR = 2


def load_tokenizer_json(source: bytes | str, subject: str, remedy: str) -> tokenizers.Tokenizer:
    """The tokenizer of a file's bytes, or of a document's text.

    Raises UnusableInputError about `subject`, with `remedy` as its hint, when it is none or could fill the memory.
    """
    import tokenizers

    with _complaints(subject, remedy):
        _check_tables(source)
        if isinstance(source, bytes):
            tokenizer = tokenizers.Tokenizer.from_buffer(source)
        else:
            tokenizer = tokenizers.Tokenizer.from_str(source)
    growth = max(_state_growth(part) for part in (tokenizer.normalizer, tokenizer.post_processor, tokenizer.decoder))
    if growth > MAX_GROWTH:
        raise UnusableInputError(f"{subject}: can make a text {growth:.3g} times longer", remedy)
    with _complaints(subject, remedy):
        _check_frames(json.loads(tokenizer.post_processor.__getstate__()) if tokenizer.post_processor else None)
    # Settings of some training run, of no meaning here; absurd ones make the library panic.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_all(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """The tokens of each text, with those around it if `special`. Raises UnusableInputError when it cannot."""
    with _complaints("the tokenizer", "download the file again"):
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=special)]


def normalized_chars(tokenizer: tokenizers.Tokenizer, text: str, most: int) -> int:
    """How many characters a text has once it is normalized; counting ends when they are more than `most`."""
    if tokenizer.normalizer is None or len(text) * MAX_GROWTH <= most:
        return len(text)
    n_chars, part = 0, max(1, most // MAX_GROWTH)
    with _complaints("the tokenizer", "download the file again"):
        for start in range(0, len(text), part):
            n_chars += len(tokenizer.normalizer.normalize_str(text[start : start + part]))
            if n_chars > most:
                break
    return n_chars


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    """How the tokens are spelled that a text is searched for, without those that count as text."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token: entry.content for token, entry in added if entry.special and entry.content}


def encode_as_text(tokenizer: tokenizers.Tokenizer, text: str, special: Mapping[int, str]) -> list[int]:
    """The tokens of a text, none of them one of `special` for its spelling. Raises UnusableInputError when it cannot.

    The library can be told not to look for them, but a model that has pieces of the same spelling, as Unigram's do,
    makes them nevertheless. Such a spelling is cut in two, and both sides are split on their own.
    """
    tokens: list[int] = []
    known: dict[str, tuple[list[int], list[str]]] = {}  # a text full of spellings is full of the same pieces
    pending = [text]
    with _complaints("the tokenizer", "download the file again"):
        tokenizer.encode_special_tokens = True
        while pending:
            part = pending.pop()
            if part not in known:
                known[part] = _encoded_or_cut(tokenizer, part, special)
            tokens += known[part][0]
            pending += known[part][1][::-1]
    return tokens


def _encoded_or_cut(
    tokenizer: tokenizers.Tokenizer, text: str, special: Mapping[int, str]
) -> tuple[list[int], list[str]]:
    """A text's tokens, or the pieces that it is to be split in first."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    tokens = encoding.ids
    if not (found := [at for at, token in enumerate(tokens) if token in special]):
        return tokens, []
    offsets = encoding.offsets
    spelled = {at for at in found if special[tokens[at]] in _normalized(tokenizer, text[slice(*offsets[at])])}
    cuts = [offsets[at][0] + 1 for at in found if at in spelled and offsets[at][1] - offsets[at][0] > 1]
    if cuts:
        return [], [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
    return [token for at, token in enumerate(tokens) if at not in spelled], []  # a single letter cannot be cut


def _normalized(tokenizer: tokenizers.Tokenizer, text: str) -> str:
    return tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text


def decode_each(tokenizer: tokenizers.Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token stands for, special ones for nothing. Raises UnusableInputError when it cannot say."""
    with _complaints("the tokenizer", "download the file again"):
        return tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=True)


def _check_tables(source: bytes | str) -> None:
    """Raise ValueError for a table of characters that the library would panic over, with a trace that it prints."""
    name = b"Precompiled" if isinstance(source, bytes) else "Precompiled"
    if name in source:  # type: ignore[operator]
        for section in _sections(json.loads(source).get("normalizer")):
            if section.get("type") == "Precompiled":
                table = base64.b64decode(section["precompiled_charsmap"], validate=True)
                if not is_sound_charsmap(table):
                    raise ValueError("its precompiled_charsmap is damaged")


def _check_frames(section: Any) -> None:
    """The same for tokens around a text that the file does not define."""
    for part in _sections(section):
        if part.get("type") == "TemplateProcessing":
            for piece in [*part["single"], *part["pair"]]:
                if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in part["special_tokens"]:
                    raise ValueError(f"it puts the unknown token {piece['SpecialToken']['id']!r} around a text")


def _sections(section: Any) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer, or what it is a sequence of."""
    if isinstance(section, dict):
        yield section
        for steps in (section.get("normalizers"), section.get("processors")):
            for step in steps if isinstance(steps, list) else ():
                yield from _sections(step)


@contextmanager
def _complaints(subject: str, remedy: str) -> Iterator[None]:
    try:
        with _without_panics() if last_words else nullcontext():  # in a process that is the command's own
            yield
    except Exception as error:  # the library raises plain Exception for anything it dislikes
        raise UnusableInputError(f"{subject}: not a usable tokenizer ({error})", remedy) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's own name for a bug of its
            raise
        raise UnusableInputError(f"{subject}: not a usable tokenizer ({error})", remedy) from None


_redirecting = threading.Lock()


@contextmanager
def _without_panics() -> Iterator[None]:
    """Within it the library's own words about its bugs go nowhere: Rust writes them to the standard error stream.

    Nothing else can stop that (the hook for panics is out of Python's reach), and a regular expression of the file's
    that takes too long is such a bug. What Python writes meanwhile, in whatever thread, still goes where it should.
    """
    with _redirecting, ExitStack() as stack:
        ours = sys.stderr
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
            if ours.fileno() != _STDERR:
                raise ValueError
            stands_in = stack.enter_context(open(os.dup(_STDERR), "w", 1, ours.encoding, ours.errors))
            stack.callback(setattr, sys, "stderr", ours)
            sys.stderr = stands_in
        with suppress(OSError):
            there = os.dup(_STDERR)
            stack.callback(os.close, there)
            stack.callback(os.dup2, there, _STDERR)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nowhere)
            os.dup2(nowhere, _STDERR)
        yield


def _state_growth(part: Any) -> float:
    """`_growth` of a normalizer, post-processor or decoder, from its state, which is its section of the file."""
    return 1 if part is None else _growth(json.loads(part.__getstate__()))


def _growth(section: Any) -> float:
    """How many times longer a text can become, at most. What only Unicode's own tables do counts as 1."""
    match section:
        case (
            {"type": "Sequence", "normalizers": [*steps]}
            | {"type": "Sequence", "processors": [*steps]}
            | {"type": "Sequence", "decoders": [*steps]}
        ):
            return prod(map(_growth, steps))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(1, len(content) / max(1, len(pattern)))
        case {"type": "Replace", "content": str(content)}:  # a regular expression may match between any two characters
            return 1 + len(content)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_replacement(base64.b64decode(table))
        case {"type": "TemplateProcessing", "single": [*pieces]}:
            return len(pieces)
    return 1


def _longest_replacement(table: bytes) -> int:
    """Bytes of the longest text in SentencePiece's table of characters: a trie, its size first, then the texts."""
    trie_nbytes = int.from_bytes(table[:4], "little")
    return max(map(len, table[4 + trie_nbytes :].split(b"\0")))
