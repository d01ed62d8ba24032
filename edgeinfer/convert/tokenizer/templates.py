"""The chat templates of a checkpoint, wherever it keeps them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.convert.json_file import read_file, read_object_if_there
from edgeinfer.errors import UnusableInputError

MAX_TEMPLATE_NBYTES = 1 << 20
MAX_TEMPLATES = 64
_TEMPLATE_NAME = re.compile(r"[\w.-]{1,64}")


def template_metadata(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The chat template from chat_template.jinja, which is newer where both are there, else from the settings.

    Further templates by name, as the settings or `additional_chat_templates/` have them, in the order of their names.
    """
    by_name = {**_templates_by_name(_default_template(directory, settings)), **_additional_templates(directory)}
    if any(len(text) > MAX_TEMPLATE_NBYTES for text in by_name.values()):
        raise UnusableInputError(
            f"{directory}: a chat template of more than {MAX_TEMPLATE_NBYTES >> 20} MiB", "get the original"
        )
    metadata: dict[str, Any] = {}
    if "default" in by_name:
        metadata["tokenizer.chat_template"] = by_name.pop("default")
    if by_name:
        metadata["tokenizer.chat_templates"] = sorted(by_name)
        metadata.update({f"tokenizer.chat_template.{name}": by_name[name] for name in sorted(by_name)})
    return metadata


def with_templates(metadata: dict[str, Any], templates: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer's keys with further templates by name."""
    if not templates:
        return metadata
    names = sorted({*metadata.get("tokenizer.chat_templates", ()), *templates})
    texts = {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
    return {**metadata, "tokenizer.chat_templates": names, **texts}


def _default_template(directory: Path, settings: dict[str, Any]) -> Any:
    file = directory / "chat_template.jinja"
    if os.path.lexists(file):
        return _read(file)
    template = settings.get("chat_template")
    return (
        template
        if template is not None
        else read_object_if_there(directory / "chat_template.json").get("chat_template")
    )


def _templates_by_name(template: Any) -> dict[str, str]:
    """A text is the default; a list has names. What isn't a template, or has no plain name, is left out."""
    if isinstance(template, str):
        return {"default": template}
    found: dict[str, str] = {}
    for entry in template if isinstance(template, list) else []:
        match entry:
            case {"name": str(name), "template": str(text)} if _TEMPLATE_NAME.fullmatch(name):
                found[name] = text
    return found


def _additional_templates(directory: Path) -> dict[str, str]:
    files = sorted((directory / "additional_chat_templates").glob("*.jinja"))[:MAX_TEMPLATES]
    return {file.stem: _read(file) for file in files if _TEMPLATE_NAME.fullmatch(file.stem)}


def _read(file: Path) -> str:
    return read_file(file, MAX_TEMPLATE_NBYTES).decode("utf-8", "replace")
