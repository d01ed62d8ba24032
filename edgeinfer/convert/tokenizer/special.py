"""Special token ids, which tokens end a text, and what is added to one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.json_file import read_object_if_there

if TYPE_CHECKING:
    import tokenizers

# Hugging Face's name of a special token, and GGUF's key for it.
_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
# The end-of-sequence tokens beyond the first get the keys for "end of turn" and "end of message", by their text.
_END_OF_MESSAGE = re.compile(r"eom|observation|call", re.IGNORECASE)
_END_OF_TURN = re.compile(r"eot|turn|im_end|<\|end\|>|user", re.IGNORECASE)
# What the C library takes for the end of a text by its spelling (src/llama-vocab.cpp, special_eog_ids).
# fmt: off
_KNOWN_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))
# fmt: on


def special_metadata(
    checkpoint: Checkpoint, parsed: dict[str, Any], settings: dict[str, Any], original: tokenizers.Tokenizer
) -> dict[str, Any]:
    """The keys of special tokens. `parsed` is tokenizer.json, `settings` tokenizer_config.json."""
    config = checkpoint.config
    if str(settings.get("tokenizer_class")).startswith("Cohere"):
        # Its class puts around a text what the settings say (transformers: CohereTokenizerFast), whatever is stored.
        settings = {"add_bos_token": True, "add_eos_token": False, **settings}
        parsed = {**parsed, "post_processor": None}
    texts = _texts(settings, parsed)
    metadata: dict[str, Any] = {}
    for kind, key in _KEYS.items():
        token = original.token_to_id(texts[kind]) if kind in texts else None
        if token is None:
            token = next(_ids(config.get(f"{kind}_token_id")), None)
        if token is not None and 0 <= token < config.vocab_size:
            metadata[f"tokenizer.ggml.{key}"] = token
    metadata |= _more_ends(metadata.get("tokenizer.ggml.eos_token_id"), end_tokens(checkpoint), original)
    for kind, added in _added(parsed, settings, texts).items():
        metadata[f"tokenizer.ggml.add_{kind}_token"] = added
    return metadata


def begin_token(settings: dict[str, Any], parsed: dict[str, Any]) -> str:
    """The text of the begin-of-sequence token, "" if there is none."""
    return _texts(settings, parsed).get("bos", "")


def end_tokens(checkpoint: Checkpoint) -> list[int]:
    """All tokens that end a generation, as generation_config.json and config.json list them."""
    generation = read_object_if_there(checkpoint.path / "generation_config.json")
    listed = [*_ids(generation.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id"))]
    return [token for token in dict.fromkeys(listed) if 0 <= token < checkpoint.config.vocab_size]


def lost_ends(metadata: dict[str, Any], listed: Iterable[int]) -> list[int]:
    """Those of the listed end tokens that the C library will not stop at: the file has three places for them."""
    kept = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    texts = metadata["tokenizer.ggml.tokens"]
    return [token for token in listed if token not in kept and texts[token] not in _KNOWN_ENDS]


def _ids(value: Any) -> Iterator[int]:
    yield from (token for token in (value if isinstance(value, list) else [value]) if type(token) is int)


def _texts(settings: dict[str, Any], parsed: dict[str, Any]) -> dict[str, str]:
    """The special tokens' texts by kind; where a post-processor puts others around a text, those begin and end it.

    BERT-like tokenizers name only `cls` and `sep`, which begin and end a text too.
    """
    entries = {kind: settings.get(f"{kind}_token") for kind in _KEYS}
    texts = {kind: entry.get("content") if isinstance(entry, dict) else entry for kind, entry in entries.items()}
    found = {kind: text for kind, text in texts.items() if isinstance(text, str) and text}
    for kind, stand_in in (("bos", "cls"), ("eos", "sep")):
        if stand_in in found:
            found.setdefault(kind, found[stand_in])
    for first, last in _frames(parsed):
        if first:
            found.setdefault("bos", first)
        if last and found.get("eos") != last:
            found["eos"] = last
    return found


def _more_ends(eos: int | None, listed: Iterable[int], original: tokenizers.Tokenizer) -> dict[str, int]:
    """Keys for the end tokens that the C library would not know otherwise."""
    others = {token: original.id_to_token(token) or "" for token in listed if token != eos}
    keys: dict[str, int] = {}
    for key, pattern in (("eom", _END_OF_MESSAGE), ("eot", _END_OF_TURN), ("eot", None), ("eom", None)):
        for token, text in others.items():
            fits = pattern.search(text) if pattern else text not in _KNOWN_ENDS
            if fits and key not in keys and token not in keys.values():
                keys[key] = token
    return {f"tokenizer.ggml.{key}_token_id": token for key, token in keys.items()}


def _added(parsed: dict[str, Any], settings: dict[str, Any], texts: dict[str, str]) -> dict[str, bool]:
    """Whether begin, end and separator are added: what the post-processor does, else what the settings say."""
    stated = {kind: settings.get(f"add_{kind}_token") for kind in ("bos", "eos", "sep")}
    by_rule: dict[str, bool] = {}
    for processor in _processors(parsed):
        match processor:
            case {"type": "ByteLevel"}:
                by_rule = {"bos": False, "eos": False, **by_rule}
            case {"type": "RobertaProcessing"}:
                by_rule |= {"bos": True, "eos": True, "sep": True}
            case {"type": "BertProcessing"}:
                by_rule |= {"bos": True, "eos": True}
            case {"type": "TemplateProcessing", "single": [first, *_, last]}:
                if begin := _special_of(first):
                    by_rule["bos"] = begin in (texts.get("bos"), texts.get("cls"))
                if end := _special_of(last):
                    by_rule["eos"] = end == texts.get("eos")
                by_rule |= _separated(processor.get("pair"), bool(begin), bool(end), texts)
    return {**{kind: flag for kind, flag in stated.items() if type(flag) is bool}, **by_rule}


def _separated(pair: Any, has_begin: bool, has_end: bool, texts: dict[str, str]) -> dict[str, bool]:
    """Whether two texts are separated by something other than the first one's own end."""
    between = pair[int(has_begin) : len(pair) - int(has_end)][1:-1] if isinstance(pair, list) else []
    if not between:
        return {}
    separators = [_special_of(piece) in (texts.get("sep"), texts.get("eos")) for piece in between]
    return {"sep": (separators[0] and not has_end) or (len(separators) == 2 and separators[1])}


def _frames(parsed: dict[str, Any]) -> Iterator[tuple[str | None, str | None]]:
    """What each post-processor puts in front of and behind a text."""
    for processor in _processors(parsed):
        match processor:
            case {"type": "RobertaProcessing" | "BertProcessing", "cls": [str(first), _], "sep": [str(last), _]}:
                yield first, last
            case {"type": "TemplateProcessing", "single": [first, *_, last]}:
                yield _special_of(first), _special_of(last)


def _processors(parsed: dict[str, Any]) -> list[Any]:
    section = parsed.get("post_processor")
    processors = section.get("processors", [section]) if isinstance(section, dict) else []
    return processors if isinstance(processors, list) else []


def _special_of(piece: Any) -> str | None:
    match piece:
        case {"SpecialToken": {"id": str(text)}}:
            return text
    return None
