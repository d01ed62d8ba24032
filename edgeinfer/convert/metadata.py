"""The `general.*` keys: what a model hub shows of a model, gathered from the model card, the config and the name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.json_file import read_file, read_object_if_there
from edgeinfer.errors import EdgeinferError

MAX_README_NBYTES = 16 << 20
MAX_CARD_NBYTES = 1 << 20

# generation_config.json's name of a sampling default, GGUF's, its type there, and the least and most that make sense.
_SAMPLING = {
    "top_k": ("top_k", int, 0, 2**31 - 1),
    "top_p": ("top_p", float, 0, 1),
    "min_p": ("min_p", float, 0, 1),
    "temperature": ("temp", float, 0, 1e6),
    "repetition_penalty": ("penalty_repeat", float, 1e-6, 1e6),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# A model card's key, and GGUF's.
_CARD_TEXTS = {
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
}
_CARD_LISTS = {"tags": ("tags", "pipeline_tag"), "languages": ("languages", "language")}


def general_metadata(checkpoint: Checkpoint, n_parameters: int) -> dict[str, Any]:
    """The `general.*` keys of a checkpoint, in llama.cpp's names, without the prefix."""
    card = _model_card(checkpoint.path / "README.md")
    name = _model_name(checkpoint)
    parts = name_parts(name.rsplit("/", 1)[-1], n_parameters)
    organization = name.rsplit("/", 1)[0] if "/" in name else None
    known: dict[str, Any] = {
        **_sampling(checkpoint.path),
        "name": _title(name.rsplit("/", 1)[-1]),
        "organization": _title(organization) if organization else None,
        **parts,
        "size_label": parts.get("size_label") or size_label(n_parameters),
        **{target: _text(card.get(source)) for source, target in _CARD_TEXTS.items()},
        **dict(_base_models(card)),
        **{target: _list(card, sources) for target, sources in _CARD_LISTS.items()},
    }
    return {key: value for key, value in known.items() if value is not None}


def _model_name(checkpoint: Checkpoint) -> str:
    """The hub id that it was fetched by, or that the config remembers, else the directory's name."""
    if checkpoint.repository:
        return checkpoint.repository
    remembered = checkpoint.config.get("_name_or_path")
    if isinstance(remembered, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", remembered) and remembered[0] != ".":
        return remembered
    # The name that the user gave, not a link's target; a file name need not be text.
    name = os.fsencode(os.path.basename(os.path.abspath(checkpoint.path))).decode("utf-8", "replace")
    return name or "model"


def _sampling(directory: Path) -> dict[str, Any]:
    """The sampling defaults that generation_config.json states as numbers; what no sampler could use is left out."""
    stated = read_object_if_there(directory / "generation_config.json")
    return {
        f"sampling.{target}": kind(stated[source])
        for source, (target, kind, least, most) in _SAMPLING.items()
        if type(stated.get(source)) in (int, float) and least <= stated[source] <= most
    }


def _model_card(path: Path) -> dict[str, Any]:
    """The YAML block at the head of README.md; nothing where it is missing or unreadable, as it is only decoration."""
    import yaml

    try:
        head = read_file(path, MAX_README_NBYTES)[:MAX_CARD_NBYTES].decode("utf-8", "replace")
    except EdgeinferError:
        return {}
    block = re.match(r"---\r?\n(.*?)\r?\n---", head, re.DOTALL)
    # Scalars stay text (the language `no` is not false, a version is not a number), and no tag means anything.
    # The compiled loader is ten times faster.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        card = yaml.load(block[1], loader) if block else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def _text(value: Any) -> str | None:
    return ",".join(_texts(value)) or None


def _texts(value: Any) -> list[str]:
    """The non-empty texts of a scalar or a list; half a surrogate pair is none."""
    candidates = value if isinstance(value, list) else [value]
    return [text for text in candidates if isinstance(text, str) and text and not _LONE_SURROGATE.search(text)]


def _list(card: dict[str, Any], keys: tuple[str, ...]) -> list[str] | None:
    return [text for key in keys for text in _texts(card.get(key))] or None


def _base_models(card: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    models = _list(card, ("base_model",))
    if models is None:
        return
    yield "base_model.count", len(models)
    for i, model in enumerate(models):
        organization, _, name = model.rpartition("/")
        yield f"base_model.{i}.name", _title(name)
        if organization:
            yield f"base_model.{i}.organization", _title(organization)
            yield f"base_model.{i}.repo_url", f"https://huggingface.co/{model}"


def _title(name: str) -> str:
    """`smollm2-135M-instruct` as a person would write it; versions and what has capitals stay as they are."""
    words = name.replace("-", " ").split()
    return " ".join(w.title() if w.islower() and not re.match(r"v\d+(\.\d+)*$|\d", w) else w for w in words)


_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_ENCODING = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_SIZE = re.compile(r"((A|\d+x)?\d+([._]\d+)?[KMBT]|small|mini|medium|large|x?xl)", re.IGNORECASE)
_FINETUNE = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)


def name_parts(name: str, n_parameters: int) -> dict[str, str | None]:
    """Split a model's name, as hubs write them, into `finetune`, `version`, `basename` and `size_label`.

    `Qwen2.5-Coder-0.5B-Instruct-v2` is of the base `Qwen2.5-Coder`, size `0.5B`, finetune `Instruct`, version `v2`.
    A name of which nothing but a base can be told gives nothing.
    """
    kinds: dict[str, list[str]] = {"finetune": [], "version": [], "basename": [], "size_label": []}
    in_base = True
    for i, part in enumerate(filter(None, name.split("-"))):
        kind = _part_kind(i, part, n_parameters)
        if kind is None:
            kind = "basename" if in_base and part[0].isalpha() else "finetune"
        elif kind == "version" and in_base and i == 0:
            kind = "basename"
        in_base = in_base and kind in ("basename", "version")
        if kind == "size_label":
            part = part.upper() if part[-1].isalpha() and part[-2:-1].isdigit() else part
        if kind in kinds:
            kinds[kind].append(part)
    joined = {kind: "-".join(dict.fromkeys(parts)) or None for kind, parts in kinds.items()}
    return joined if any(joined[k] for k in ("finetune", "version", "size_label")) else dict.fromkeys(kinds)


def _part_kind(i: int, part: str, n_parameters: int) -> str | None:
    if _VERSION.fullmatch(part):
        return "version"
    if _ENCODING.fullmatch(part):
        return "encoding"
    if i > 0 and _SIZE.fullmatch(part):
        return "finetune" if _is_context_length(part, n_parameters) else "size_label"
    return "finetune" if i > 0 and _FINETUNE.fullmatch(part) else None


def _is_context_length(part: str, n_parameters: int) -> bool:
    """Whether a size (`128K`) is too far from the parameter count to be one."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", part.upper().replace("_", "."))
    if not number:
        return False
    stated = float(number[1]) * 1000.0 ** " KMBT".index(number[2])
    return abs(stated - n_parameters) > 7 * n_parameters / 8


def size_label(n_parameters: int) -> str:
    """A count of parameters with at least two digits: `1.1B`, `135M`."""
    scales = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    scale, suffix = next((s for s in scales if n_parameters >= s[0]), scales[-1])
    scaled = n_parameters / scale
    decimals = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{decimals}f}{suffix}"
