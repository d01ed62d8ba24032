"""Special token ids, whether they are added to a text, and the chat templates."""

from __future__ import annotations

import os
import re
from typing import Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.json_file import read_file, read_object_if_there
from edgeinfer.errors import UnusableInputError

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
MAX_TEMPLATE_NBYTES = 1 << 20
_TEMPLATE_NAME = re.compile(r"[\w.-]{1,64}")


def special_metadata(checkpoint: Checkpoint, parsed: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of special tokens and templates. `parsed` is tokenizer.json, `settings` tokenizer_config.json."""
    ids = {str(entry["content"]): int(entry["id"]) for entry in parsed.get("added_tokens") or []}
    metadata: dict[str, Any] = {}
    for kind, key in _KEYS.items():
        token = ids.get(_content(settings.get(f"{kind}_token")))
        if token is None:
            token = checkpoint.config.get(f"{kind}_token_id")
        if type(token) is int and 0 <= token < checkpoint.config.vocab_size:
            metadata[f"tokenizer.ggml.{key}"] = token
    for kind, added in _added(parsed, settings).items():
        metadata[f"tokenizer.ggml.add_{kind}_token"] = added
    return {**metadata, **_templates(checkpoint, settings)}


def _content(entry: Any) -> str:
    """A special token is written as its text or as an object with it."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _added(parsed: dict[str, Any], settings: dict[str, Any]) -> dict[str, bool]:
    """Whether begin and end of sequence are added: what the post-processor does, else what the settings say."""
    stated = {kind: settings.get(f"add_{kind}_token") for kind in ("bos", "eos")}
    section = parsed.get("post_processor")
    by_rule: dict[str, bool] = {}
    for processor in section.get("processors", [section]) if isinstance(section, dict) else []:
        match processor:
            case {"type": "ByteLevel"}:
                by_rule = {"bos": False, "eos": False, **by_rule}
            case {"type": "TemplateProcessing", "single": [first, *_, last]}:
                begin, end = _special_of(first), _special_of(last)
                if begin:
                    own = [_content(settings.get(key)) for key in ("bos_token", "cls_token")]
                    by_rule["bos"] = begin in own or not any(own)
                if end:
                    by_rule["eos"] = True
    return {**{kind: flag for kind, flag in stated.items() if type(flag) is bool}, **by_rule}


def _special_of(piece: Any) -> str | None:
    match piece:
        case {"SpecialToken": {"id": str(text)}}:
            return text
    return None


def _templates(checkpoint: Checkpoint, settings: dict[str, Any]) -> dict[str, Any]:
    """The chat template from chat_template.jinja, which is newer where both are there, else from the settings."""
    file = checkpoint.path / "chat_template.jinja"
    if os.path.lexists(file):
        template: Any = read_file(file, MAX_TEMPLATE_NBYTES).decode("utf-8", "replace")
    else:
        template = settings.get("chat_template")
    if template is None:
        template = read_object_if_there(checkpoint.path / "chat_template.json").get("chat_template")
    by_name = {"default": template} if isinstance(template, str) else _named_templates(template)
    if any(len(text) > MAX_TEMPLATE_NBYTES for text in by_name.values()):
        raise UnusableInputError(
            f"{checkpoint.path}: a chat template of more than {MAX_TEMPLATE_NBYTES >> 20} MiB", "get the original"
        )
    metadata: dict[str, Any] = {}
    if "default" in by_name:
        metadata["tokenizer.chat_template"] = by_name.pop("default")
    if by_name:
        metadata["tokenizer.chat_templates"] = sorted(by_name)
        metadata.update({f"tokenizer.chat_template.{name}": by_name[name] for name in sorted(by_name)})
    return metadata


def _named_templates(entries: Any) -> dict[str, str]:
    """The templates by name, as the settings list them; what isn't one, or has no plain name, is left out."""
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else []:
        match entry:
            case {"name": str(name), "template": str(text)} if _TEMPLATE_NAME.fullmatch(name):
                found[name] = text
    return found
