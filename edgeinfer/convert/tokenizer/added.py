"""Added tokens of a tokenizer that stands in a tokenizer.model, which knows nothing of them.

tokenizer_config.json lists them by id (`added_tokens_decoder`), older checkpoints by text (added_tokens.json). They
follow the model's pieces, or stand in place of some: InternLM2 calls pieces that it doesn't use `<|im_start|>` and so
on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeinfer.convert.config import MAX_VOCAB_SIZE
from edgeinfer.convert.json_file import read_object_if_there
from edgeinfer.errors import UnusableInputError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def with_added_tokens(directory: Path, document: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json `document` with the added tokens that stand beside it.

    Raises UnusableInputError for a list that makes no sense.
    """
    added = {**_by_text(directory), **_by_id(directory, settings)}
    if not added:
        return document
    texts = {token: text for text, token in document["model"]["vocab"].items()}
    if missing := set(range(len(texts), max(added) + 1)) - set(added):
        raise UnusableInputError(
            f"{directory}: there is no token {min(missing)}, but an added one of a larger number",
            "tokenizer.model and tokenizer_config.json are of different versions: download both again",
        )
    renamed = {token: entry["content"] for token, entry in added.items() if token in texts}
    gone = {texts[token] for token, text in renamed.items() if text != texts[token]}
    vocab = {text: token for token, text in (texts | renamed).items()}
    if len(vocab) < len(texts):
        raise _senseless(directory, "an added token has the text of another token")
    merges = [pair for pair in document["model"]["merges"] if gone.isdisjoint((*pair, "".join(pair)))]
    entries = {entry["id"]: entry for entry in document["added_tokens"]} | added
    model = {**document["model"], "vocab": vocab, "merges": merges}
    return {**document, "model": model, "added_tokens": [entries[token] for token in sorted(entries)]}


def _by_text(directory: Path) -> dict[int, dict[str, Any]]:
    path = directory / "added_tokens.json"
    entries = read_object_if_there(path)
    return {_number(path, token): _entry(path, _number(path, token), text, {}) for text, token in entries.items()}


def _by_id(directory: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    path = directory / "tokenizer_config.json"
    entries = settings.get("added_tokens_decoder")
    if entries is None:
        return {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise _senseless(path, "'added_tokens_decoder' is no list of tokens by number")
    numbers = {_number(path, key): entry for key, entry in entries.items()}
    return {token: _entry(path, token, entry.get("content"), entry) for token, entry in numbers.items()}


def _entry(path: Path, token: int, text: Any, stated: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(text, str) or not text:
        raise _senseless(path, f"the added token {token} has no text")
    flags = {flag: stated.get(flag) is True for flag in _FLAGS}
    return {"id": token, "content": text, **flags, "special": stated.get("special") is True}


def _number(path: Path, value: Any) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < MAX_VOCAB_SIZE):
        raise _senseless(path, f"an added token has the number {text[:20]!r}")
    return int(text)


def _senseless(path: Path, what: str) -> UnusableInputError:
    return UnusableInputError(f"{path}: {what}", "download the file again")
