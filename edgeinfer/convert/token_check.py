"""Holds a GGUF vocabulary against the checkpoint's own tokenizer, before any weight is read.

Rules that the library is known not to have settle it at once. Else the vocabulary is written to a file of its own and
opened by the library that will run the model. Where that splits text differently, the output carries the
original tokenizer.json too, and `runtime.vocabulary` splits with that.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.tokenizer import LoadedTokenizer
from edgeinfer.convert.tokenizer.vocabulary import TokenType
from edgeinfer.convert.writer import encode_header
from edgeinfer.errors import ResourceError, UnusableInputError
from edgeinfer.temporary import temporary_folder
from edgeinfer.tokenizer_json import decode_each, encode_all
from edgeinfer.types import Vocabulary

if TYPE_CHECKING:
    import tokenizers

ORIGINAL_KEY = "tokenizer.huggingface.json"
OpenVocabulary = Callable[[Path], AbstractContextManager[Vocabulary]]

CORPUS = (
    "The quick brown fox, it's said, jumps over 3 lazy dogs; they'd cost $1,234.56 in 2026! WE'LL SEE, I'M SURE.",
    "Ein schöner Tag für Übungen: Straßenbahn, naïve façade, œuvre — déjà vu. İstanbul ǅ ﬁ ﬂ ½ x² №5 ＡＢＣ",
    "Cafe\u0301 nai\u0308ve A\u030angstro\u0308m vie\u0323\u0302t \u1100\u1161\u11a8 \u2126 \u212b",
    "Съешь же ещё этих мягких французских булок. Το γρήγορο άλογο. שָׁלוֹם עולם. مَرْحَبًا بالعالم",
    "私は昨日、東京で1000円の本を買いました。你好,世界!안녕하세요 세계 ｶﾞ ㍿ 〇",
    "नमस्ते दुनिया। क्षत्रिय สวัสดีชาวโลก น้ำ ខ្មែរ မြန်မာ தமிழ் తెలుగు",
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # tab and spaces\n\n\n    if x != 0:\r\n        pass\n",
    '<html>\n  <body class="a b">a&nbsp;b</body>\n</html> https://example.org/a_b?c=d#e ```py\nx += 1\n``` C:\\temp\\',
    "emoji 🚀 family 👨‍👩‍👧‍👦 flag 🇩🇪 thumbs 👍🏽 heart ❤️ math ∑∫√≠ arrows →⇒ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "   leading, trailing   and    inner spaces \t\n  ",
    "1 12 123 1234 12345 1234567890 ٣٤٥ Ⅷ 3.14e-10 0xFFEE camelCase snake_case SCREAMING iPhone",
    "▁▁ ▁a ▁▁▁▁b a\u00a0b a\u3000b a\u200bb a\ufeffb \u00ad zero\u200dwidth \ufffd \x07 ''' \"\" ...!!!???",
    "\n\n \n\t\n" + "a" * 40 + " " * 33 + "x" + "\n" * 5 + "=" * 30,
)
_ADDED_TOKENS_TRIED = 256
_VOCABULARY_TOKENS_TRIED = 4096
_TOKENS_PER_TEXT = 32


@dataclass(frozen=True, slots=True)
class Settled:
    """What the check found: keys that the file needs besides, and what to tell about it."""

    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()


def settle(metadata: dict[str, Any], tokenizer: LoadedTokenizer, open_vocabulary: OpenVocabulary) -> Settled:
    """Decide whether the file must carry the original tokenizer; `metadata` is that of the file without it.

    Raises UnusableInputError when the library does not load the vocabulary, ResourceError without temporary space.
    """
    notes = []
    if left_out := tokenizer.left_out:
        shown = ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else "")
        notes.append(f"{len(left_out)} added tokens that the model has no embedding for are left out: {shown}")
    if lost := tokenizer.lost_ends:
        notes.append(f"token {', '.join(map(str, lost))} ends a text too, but the file format has no place for it")
    reason = beyond_llama_cpp(tokenizer)
    if reason is None or tokenizer.is_assumed:  # loading a large vocabulary takes half a second
        reason = _tried(metadata, tokenizer, open_vocabulary) or reason
    if reason is None:
        return Settled({}, tuple(notes))
    notes.append(f"llama.cpp's own tokenizer is not exact here ({reason}): the file carries the original one too")
    return Settled({ORIGINAL_KEY: embedded(tokenizer)}, tuple(notes))


def _tried(metadata: dict[str, Any], tokenizer: LoadedTokenizer, open_vocabulary: OpenVocabulary) -> str | None:
    """What the C library does differently, once it has loaded the vocabulary."""
    try:
        with temporary_folder(Path(tempfile.gettempdir())) as folder:
            path = folder / "vocabulary.gguf"
            path.write_bytes(encode_header(metadata, ()))
            with open_vocabulary(path) as vocabulary:
                return first_difference(vocabulary, tokenizer.original)
    except OSError as error:
        raise ResourceError(f"{tempfile.gettempdir()}: cannot be written ({error.strerror})", "set TMPDIR") from None
    except UnusableInputError as error:
        reason = error.message.removeprefix(f"{path}: ").rpartition("error loading model vocabulary: ")[2]
        raise UnusableInputError(
            f"llama.cpp does not take the tokenizer: {reason}", "with --pre, give another name; or another checkpoint"
        ) from None


def embedded(tokenizer: LoadedTokenizer) -> str:
    """The tokenizer.json to carry along: the same tokens are special in it as in the file's own vocabulary."""
    types = tokenizer.metadata["tokenizer.ggml.token_type"]
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = [
        {**entry, "special": bool(types[entry["id"]] in special)}
        for entry in tokenizer.document.get("added_tokens") or []
    ]
    document = {**tokenizer.document, "truncation": None, "padding": None, "added_tokens": added}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def first_difference(vocabulary: Vocabulary, original: tokenizers.Tokenizer) -> str | None:
    """Compare on several languages, code, emoji, the vocabulary's own words, and added tokens inside text."""
    texts = check_texts(original)
    for text, expected in zip(texts, encode_all(original, texts), strict=True):
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True).tolist()
        if tokens != expected:
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            return f"it splits {shown!r} differently from token {at} on"
    return None


def check_texts(original: tokenizers.Tokenizer) -> list[str]:
    """What vocabularies are compared on."""
    added = sorted(original.get_added_tokens_decoder().items())
    tried = [token.content for _, token in added[:: max(1, len(added) // _ADDED_TOKENS_TRIED)]]
    with_added = ["".join(f"{token}a b{token} {token}\n" for token in part) for part in _parts(tried)]
    return [*CORPUS, *with_added, *_own_words(original)]


def _own_words(original: tokenizers.Tokenizer) -> Iterator[str]:
    """Tokens from all over the vocabulary, one after the other: a word that no merge leads to shows here."""
    n_tokens = original.get_vocab_size()
    some = range(0, n_tokens, max(1, n_tokens // _VOCABULARY_TOKENS_TRIED))
    words = decode_each(original, some)
    for part in _parts([word for word in words if "\ufffd" not in word]):
        yield "".join(part)


def _parts(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), _TOKENS_PER_TEXT):
        yield items[start : start + _TOKENS_PER_TEXT]


def beyond_llama_cpp(tokenizer: LoadedTokenizer) -> str | None:
    """Rules of the file that llama.cpp has no counterpart for, whether the corpus shows it or not."""
    document = tokenizer.document
    if tokenizer.is_assumed:
        return f"nothing but --pre says that it is {tokenizer.metadata['tokenizer.ggml.pre']}"
    for entry in document.get("added_tokens") or []:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]
        if flags:
            return f"the added token {entry['content']!r} has {flags[0]}"
    return _normalizer_beyond(document.get("normalizer"), document["model"]["type"])


def _normalizer_beyond(section: Any, kind: str) -> str | None:
    match section, kind:
        case (None, _) | ({"type": "Prepend", "prepend": "▁"}, "BPE"):
            return None
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "BPE":
            return None
        case {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}, "WordPiece":
            return None
        case (({"type": "Precompiled"} | {"type": "Replace", "pattern": {"Regex": " {2,}"}}), "Unigram"):
            return None
        case {"type": "Sequence", "normalizers": [*steps]}, _:
            return next((found for step in steps if (found := _normalizer_beyond(step, kind))), None)
        case {"type": str(name)}, _:
            return f"the normalizer {name}"
    return "a normalizer of unknown form"
